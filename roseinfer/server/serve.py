"""``roseinfer serve``: an HTTP server for OpenAI clients."""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.cli.model_options import (
    add_model_options,
    add_settings,
    follow_leader_if_launched,
    load_llm,
    parsed_fields,
    validate_options,
)
from roseinfer.config import API_KEY, EngineConfig, ServerConfig, TorchrunRank
from roseinfer.engine_client.standard_streams import queued_streams
from roseinfer.engine_client.subprocess_client import run_engine_process
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.garbage import freeze_gc
from roseinfer.terminal import print_status

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Iterator

    from roseinfer.engine_client.protocol import EngineClient
    from roseinfer.server.connections import ConnectionLimits

# The engine of the server, in its own process if possible.


@contextmanager
def open_engine_client(args: argparse.Namespace, command: str) -> Iterator[EngineClient]:
    """Yield a client of an engine with the options' model; messages begin with ``command``.

    The engine has its own process, so that it does not share an interpreter with the HTTP server.
    Under ``torchrun``, and where there is no POSIX, it runs in this process: the leading rank.
    """
    if TorchrunRank.from_env() is None and os.name == "posix":
        with run_engine_process(args, command) as engine:
            yield engine
    else:
        llm = load_llm(args, command)
        from roseinfer.engine_client.in_process import InProcessClient

        yield InProcessClient(llm)


HELP = "serve a language model to OpenAI clients over HTTP"
DESCRIPTION = """\
Serve a language model to OpenAI clients over HTTP: completions, chat completions and responses.
SIGTERM or Ctrl-C shuts it down once the open completions have ended; a second one ends it at once.
Exit status: 0 after a shutdown; 2 after a usage error, or if the model cannot be loaded."""

_NAME = "roseinfer serve"
_SERVE_MODULES = ("httptools", "prometheus_client", "pydantic", "starlette", "uvicorn")
_SCALE_MODULES = ("ray.serve",)
_USAGE_ERROR, _INTERRUPTED = 2, 128 + 2


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_settings(parser, ServerConfig)
    add_settings(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    with queued_streams():
        try:
            _serve(args)
        except RoseinferError as error:
            print_status(" ".join([f"{_NAME}:", *str(error).split()]))
            return _USAGE_ERROR
        except KeyboardInterrupt:
            return _INTERRUPTED
        return 0


def _serve(args: argparse.Namespace) -> None:
    # Check all options before torch is loaded, which takes seconds.
    _require("the server needs", _SERVE_MODULES, "serve")
    config = ServerConfig(**parsed_fields(args, ServerConfig))
    if config.replicas is not None:
        _require("replicas need", _SCALE_MODULES, "scale")
    chat_template = None if config.chat_template is None else _read(config.chat_template)
    validate_options(args)
    follow_leader_if_launched(args, _NAME)
    from roseinfer.server.connections import ConnectionLimits, raise_file_limit
    from roseinfer.server.http_server import open_listener, with_loopback_hosts

    with open_listener(config.host, config.port) as listener:
        config = with_loopback_hosts(config, listener)
        files = raise_file_limit()
        limits = ConnectionLimits.for_open_files(files)
        print_status(
            f"{_NAME}: at most {limits.connections} connections ({files} open files are allowed)"
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        serve = _serve_single if config.replicas is None else _serve_replicas
        serve(args, config, chat_template, listener, limits)


def _serve_single(
    args: argparse.Namespace,
    config: ServerConfig,
    chat_template: str | None,
    listener: socket.socket,
    limits: ConnectionLimits,
) -> None:
    with open_engine_client(args, _NAME) as engine_client:
        from roseinfer.server.app import build_app
        from roseinfer.server.http_server import HttpServer
        from roseinfer.server.service import Service

        names = config.served_model_name or (args.model,)
        service = Service(engine_client, names, config, chat_template)

        def ready() -> None:
            _print_client_example(config, names[0], service.prompts.can_chat, listener)

        app = build_app(service)
        freeze_gc()
        HttpServer(app, service, ready, limits).run([listener])


def _serve_replicas(
    args: argparse.Namespace,
    config: ServerConfig,
    chat_template: str | None,
    listener: socket.socket,
    limits: ConnectionLimits,
) -> None:
    from roseinfer.replicas.deployment import run_replicas
    from roseinfer.replicas.front import ReplicaProxy
    from roseinfer.replicas.spec import ReplicaSpec
    from roseinfer.server.http_server import HttpServer

    engine_config = parsed_fields(args, EngineConfig)
    spec = ReplicaSpec(args.model, args.device, args.dtype, engine_config, config, chat_template)
    print_status(f"{_NAME}: starting Ray and {config.replicas} replicas")
    with run_replicas(spec) as replicas:
        front, can_chat = ReplicaProxy(replicas, config), replicas.can_chat()

        def ready() -> None:
            _print_client_example(config, spec.names[0], can_chat, listener)

        HttpServer(front.app, front, ready, limits).run([listener])


def _require(subject: str, modules: tuple[str, ...], extra: str) -> None:
    """Raise unless the modules of an extra are installed."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            raise ConfigError(
                f"{subject} {name}, which is not installed; run pip install '.[{extra}]' in the "
                "folder of roseinfer's sources"
            ) from None


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file}: cannot read the file: {error}") from None


def _print_client_example(
    config: ServerConfig, name: str, can_chat: bool, listener: socket.socket
) -> None:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = "..." if config.api_key is not None else "none"
    if config.api_key is None and not listener.getsockname()[0].startswith("127."):
        print_status(
            f"{_NAME}: no API key: every client that reaches this machine is served; set {API_KEY}"
        )
    call = f'client.completions.create(model="{name}", prompt="Once upon a time").choices[0].text'
    if can_chat:
        messages = '[{"role": "user", "content": "Hello!"}]'
        call = f'client.chat.completions.create(model="{name}", messages={messages})'
        call += ".choices[0].message.content"
    print_status(f"{_NAME}: {name} is served at {url} (open it in a browser to try it). Client:\n")
    print_status("    from openai import OpenAI")
    print_status(f'    client = OpenAI(base_url="{url}/v1", api_key="{key}")')
    print_status(f"    print({call})\n")
