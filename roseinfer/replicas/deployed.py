"""What every replica is made of, as plain values that go from process to process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from roseinfer.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model, how it is run, and how it is served."""

    model: str
    device: str | None
    dtype: str | None
    engine_config: dict[str, Any]
    config: ServerConfig
    chat_template: str | None

    def __post_init__(self) -> None:
        if self.device is not None and ":" in self.device:
            raise ConfigError(
                f"--device {self.device} names one GPU, and each replica gets one of its own: "
                "--device cuda"
            )

        if self.engine_config.get("tensor_parallel_size", 1) != 1:
            raise ConfigError(
                "--replicas and --tensor-parallel-size do not go together: a replica has one GPU"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return self.config.served_model_name or (self.model,)

    def gpus_wanted(self, there: int) -> int:
        """Return how many GPUs each replica asks for, of which so many are there for all."""
        if self.device == "cpu" or (self.device is None and not there):
            return 0
        wanted = self.config.replicas or 1
        if there < wanted:
            raise ConfigError(
                f"--replicas {wanted} needs a GPU for each, and {there} are there: fewer replicas, "
                "or --device cpu"
            )
        return 1
