"""What the sweep looks at: a class of models with its config, as it is or varied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@dataclass(frozen=True, slots=True)
class Subject:
    kind: str
    """The type of the model, as transformers' mappings know it."""
    variant: str = ""
    """How it differs from the class's own defaults, in words."""
    changes: dict[str, Any] = field(default_factory=dict, compare=False)
    """The same as values of the config."""
    max_length: int | None = None
    dtype: str = "float32"

    @property
    def model_class(self) -> str:
        return _class_names(self.kind)[0]

    @property
    def config_class(self) -> str:
        name: str = CONFIG_MAPPING_NAMES.get(self.kind, "")
        return name

    def __str__(self) -> str:
        varied = f", {self.variant}" if self.variant else ""
        return f"{self.model_class} by {self.config_class}{varied}"


def every_class() -> list[Subject]:
    """Return every pair of a class and its config in transformers' mapping of causal models."""
    found: dict[tuple[str, str], Subject] = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        subject = Subject(kind)
        found.setdefault((subject.model_class, subject.config_class), subject)
    return sorted(found.values(), key=str)


def _class_names(kind: str) -> tuple[str, ...]:
    """Return the classes of a type: one, but the mapping may hold several."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind)
    return names if isinstance(names, tuple) else (names,)
