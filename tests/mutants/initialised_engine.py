"""This distribution's engine on a model with the small weights that transformers initialises."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.targets import engine_models
from pytest_roseinfer.targets.roseinfer_engine import OPTION_CHOICES, PATHS, RoseinferEngine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import FastPath


def _needs_a_model(path: FastPath) -> bool:
    return any("model" in settings for settings in path.runs_with)


def _without_models(settings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    left = [{name: each[name] for name in each if name != "model"} for each in settings]
    return [each for at, each in enumerate(left) if each not in left[:at]]


class InitialisedEngine(RoseinferEngine):
    """Engine whose tokens hardly depend on their context, so that logprobs must show errors."""

    paths: ClassVar[Mapping[str, FastPath]] = {
        name: replace(path, device="cuda")
        if _needs_a_model(path)
        else replace(path, aims=_without_models(path.settings_to_draw))
        for name, path in PATHS.items()
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **OPTION_CHOICES,
        "model": (engine_models.AS_INITIALISED,),
    }
