"""Specification of the replicas, which needs no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from roseinfer.config import ServerConfig


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Model, engine options and server options of all replicas."""

    model: str
    device: str | None
    dtype: str | None
    engine_config: dict[str, Any]
    config: ServerConfig
    chat_template: str | None

    def __post_init__(self) -> None:
        if self.device is not None and ":" in self.device:
            raise ConfigError(
                f"--device {self.device}: it is one GPU, but each replica needs a GPU of its own; "
                "use --device cuda"
            )

        if self.engine_config.get("tensor_parallel_size", 1) != 1:
            raise ConfigError(
                "--replicas: cannot be combined with --tensor-parallel-size, as a replica has one "
                "GPU; use one of them"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return self.config.served_model_name or (self.model,)

    def gpus_per_replica(self, num_gpus: int) -> int:
        """Return the number of GPUs per replica, if ``num_gpus`` GPUs are available for all."""
        if self.device == "cpu" or (self.device is None and not num_gpus):
            return 0
        num_replicas = self.config.replicas or 1
        if num_gpus < num_replicas:
            raise ConfigError(
                f"--replicas {num_replicas}: each needs a GPU, and {num_gpus} are available; use "
                "fewer replicas, or --device cpu"
            )
        return 1
