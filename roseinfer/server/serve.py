"""``roseinfer serve``: an HTTP server for OpenAI's clients."""

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
    follow_if_launched,
    given_of,
    load_llm,
    refuse_mistakes,
)
from roseinfer.config import API_KEY, EngineConfig, Launched, ServerConfig
from roseinfer.engine_client.protocol import keep_loaded
from roseinfer.engine_client.standard_streams import queued_streams
from roseinfer.engine_client.subprocess_client import running
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.progress import say

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Iterator

    from roseinfer.engine_client.protocol import ServedEngine
    from roseinfer.server.connections import Limits

# Starts the engine that a command serves, in a process of its own where that can be.


@contextmanager
def served_engine(args: argparse.Namespace, command: str) -> Iterator[ServedEngine]:
    """Yield an engine with the model of the options. ``command`` says what is done meanwhile.

    It has its own process, so that it shares no interpreter with what reads and sends. Under
    ``torchrun`` it stays in this one, which is the rank that leads.
    """
    if Launched.from_env() is None and os.name == "posix":
        with running(args, command) as engine:
            yield engine
    else:
        llm = load_llm(args, command)
        from roseinfer.engine_client.in_process import InProcess

        yield InProcess(llm)


HELP = "serve a language model to OpenAI's clients over HTTP"
DESCRIPTION = """\
Serve a language model to OpenAI's clients over HTTP: completions, chat completions and responses.
SIGTERM or Ctrl-C ends it when the texts that run are done, and a second one at once. Exit status 0
after that, 2 when nothing could be served: wrong usage, or a model that cannot be loaded."""

_NAME = "roseinfer serve"
_EXTRA = ("httptools", "prometheus_client", "pydantic", "starlette", "uvicorn")
_SCALE = ("ray.serve",)
_NOTHING_DONE, _INTERRUPTED = 2, 128 + 2


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_settings(parser, ServerConfig)
    add_settings(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    with queued_streams():
        try:
            _serve(args)
        except RoseinferError as error:
            say(" ".join([f"{_NAME}:", *str(error).split()]))
            return _NOTHING_DONE
        except KeyboardInterrupt:
            return _INTERRUPTED
        return 0


def _serve(args: argparse.Namespace) -> None:
    # All of this refuses what makes no sense before torch is loaded.
    _require("the server needs", _EXTRA, "serve")
    config = ServerConfig(**given_of(args, ServerConfig))
    if config.replicas is not None:
        _require("replicas need", _SCALE, "scale")
    template = None if config.chat_template is None else _read(config.chat_template)
    refuse_mistakes(args)
    follow_if_launched(args, _NAME)
    from roseinfer.server.connections import Limits, raise_file_limit
    from roseinfer.server.http_server import bound, with_hosts

    with bound(config.host, config.port) as listener:
        config = with_hosts(config, listener)
        files = raise_file_limit()
        limits = Limits.of_files(files)
        say(f"{_NAME}: at most {limits.connections} connections ({files} open files are allowed)")
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        serve = _serve_here if config.replicas is None else _serve_replicas
        serve(args, config, template, listener, limits)


def _serve_here(
    args: argparse.Namespace,
    config: ServerConfig,
    template: str | None,
    listener: socket.socket,
    limits: Limits,
) -> None:
    with served_engine(args, _NAME) as served:
        from roseinfer.server.app import application
        from roseinfer.server.http_server import HttpServer
        from roseinfer.server.service import Service

        names = config.served_model_name or (args.model,)
        service = Service(served, names, config, template)

        def ready() -> None:
            _say_how_to_try(config, names[0], service.prompts.can_chat, listener)

        app = application(service)
        keep_loaded()
        HttpServer(app, service, ready, limits).run([listener])


def _serve_replicas(
    args: argparse.Namespace,
    config: ServerConfig,
    template: str | None,
    listener: socket.socket,
    limits: Limits,
) -> None:
    from roseinfer.replicas.deployment import Deployed, running
    from roseinfer.replicas.front import Front
    from roseinfer.server.http_server import HttpServer

    engine_config = given_of(args, EngineConfig)
    deployed = Deployed(args.model, args.device, args.dtype, engine_config, config, template)
    say(f"{_NAME}: starting Ray and {config.replicas} replicas")
    with running(deployed) as replicas:
        front, can_chat = Front(replicas, config), replicas.can_chat()

        def ready() -> None:
            _say_how_to_try(config, deployed.names[0], can_chat, listener)

        HttpServer(front.app, front, ready, limits).run([listener])


def _require(what: str, modules: tuple[str, ...], extra: str) -> None:
    """Raise unless what an extra installs is there."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            raise ConfigError(
                f"{what} {name}, which is not installed: pip install '.[{extra}]' in the folder of "
                "roseinfer's sources adds all that is needed"
            ) from None


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}") from None


def _say_how_to_try(
    config: ServerConfig, name: str, can_chat: bool, listener: socket.socket
) -> None:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = "..." if config.api_key is not None else "none"
    if config.api_key is None and not listener.getsockname()[0].startswith("127."):
        say(f"{_NAME}: whoever reaches this machine may use it: {API_KEY} would ask for a key")
    ask = f'client.completions.create(model="{name}", prompt="Once upon a time").choices[0].text'
    if can_chat:
        messages = '[{"role": "user", "content": "Hello!"}]'
        ask = f'client.chat.completions.create(model="{name}", messages={messages})'
        ask += ".choices[0].message.content"
    say(f"{_NAME}: {name} is served at {url} (a page to try it), and to clients:\n")
    say("    from openai import OpenAI")
    say(f'    client = OpenAI(base_url="{url}/v1", api_key="{key}")')
    say(f"    print({ask})\n")
