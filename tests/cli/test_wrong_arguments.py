"""Wrong arguments of every command: rejected before torch is imported, which takes seconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.python_process import run_python

if TYPE_CHECKING:
    from pathlib import Path

_KV = "pytest_roseinfer.targets.roseinfer_kv"
_MODEL = {
    "--hf-model-id ./nowhere": "there is no such directory",
    "--hf-model-id .": "it has no config.json",
    "--random-weights --model gpt3": "did you mean gpt2?",
    "--random-weights --hf-model-id gpt3": "did you mean gpt2?",
    "--device gpu": "the engine runs on cpu, cuda or cuda:1",
    "--dtype float23": "did you mean float32?",
    "--json no/where.json": "make the directory no first",
}
_RUNS = {
    "--repeat-runs 0": "must be at least 1, not 0",
    "--warmup-runs some": "invalid whole_number value",
    "--peers vlm": "did you mean vllm?",
    "--plot chart.jpg": "must end in .png",
}
_SERVING = {
    **_MODEL,
    **_RUNS,
    "--num-requests 0": "must be at least 1, not 0",
    "--max-new-tokens x": "invalid whole_number value",
    "--top-k 3": "add --do-sample",
    "--do-sample --temperature -1": "temperature is -1.0",
    "--do-sample --top-p 2": "top_p is 2.0",
    "--block-size 0": "block_size must be a whole number of at least 1",
    "--run-ahead 99": "run_ahead must be a whole number of at least 0 and at most 16",
    "--max-batch-sise 3": "did you mean --max-batch-size?",
}
_STREAMING = {
    "--prompt-repeats 1,0": "must be at least 1, not 0",
    "--tokenize-workers -1": "must be at least 0, not -1",
    "--submit-interval-ms -1": "must be at least 0, not -1",
    "--stream-interval 0": "must be at least 1, not 0",
    "--prefill-admission-policy lifo": "invalid choice: 'lifo'",
}
WRONG_ARGUMENTS = {
    "roseinfer": {
        "generat": "invalid choice: 'generat'",
        "--vresion": "did you mean --version?",
        "generate --prompt x --temprature 1": "did you mean --temperature?",
        "generate --prompt x --device cpux": "did you mean cpu?",
        "generate --prompt x --dtype bfloat": "did you mean bfloat16?",
        "generate --prompt x --model ./nowhere": "there is no such directory",
        "generate --prompt x --model .": "it has no config.json",
        "generate --prompt x --top-k -1": "top_k is -1",
        "generate --prompt x --top-p 2": "top_p is 2.0",
        "generate --prompt x --min-p 2": "min_p is 2.0",
        "generate --prompt x --speculation medusa": "invalid choice: 'medusa'",
        "generate --prompt x --repetition-penalty 0": "repetition_penalty is 0.0",
        "generate --prompt x --temperature hot": "invalid float value: 'hot'",
        "generate --prompt x --max-new-tokens 0": "max_new_tokens is 0",
        "generate --prompt x --block-size 0": "block_size must be",
        "generate --prompt x --max-batch-size 0": "max_batch_size must be",
        "generate --prompt x --kv-cache-tokens 0": "kv_cache_tokens must be",
        "generate --prompt x --max-length 0": "max_length must be",
        "generate --prompt x --prefill-admission-policy lifo": "invalid choice: 'lifo'",
        "generate --prompt x --logprobs": "--logprobs needs --json",
        "generate --prompt x --top-logprobs 2": "--top-logprobs needs --json",
        "generate --prompt x --json --top-logprobs 21": "at most 20",
        "generate --prompt x --prompt-logprobs": "--prompt-logprobs needs --json",
        "generate --prompt x --presence-penalty 3": "presence_penalty is 3.0; it must be between",
        "generate --prompts-file ./nowhere": "cannot be read",
        "verify --profile nightl": "did you mean nightly?",
        "verify --examples 0": "must be at least 1",
        "verify --seed -1": "must be at least 0",
        "verify --report kv.text": "must end in .json or .html",
        "verify --target Cache": "is not a target",
        f"verify --target {_KV}:GroupedManger": "did you mean GroupedManager?",
        f"verify --exhaustive {_KV[:-1]}:GroupedManager": f"did you mean {_KV}?",
        "verify --exhaustive --seed 3": "--seed: is for searches, and --exhaustive runs all",
        "verify --profil dev --sed 3": "did you mean --seed?",
    },
    "roseinfer.bench": {
        "laddr": "invalid choice: 'laddr'",
        **{f"ladder {words}": message for words, message in {**_MODEL, **_RUNS}.items()},
        "ladder --max-new-tokens 1": "must be at least 2, not 1",
        "ladder --run-ahead 99": "run_ahead must be a whole number of at least 0 and at most 16",
        **{f"trace {words}": message for words, message in _MODEL.items()},
        "trace --steps 7": "must be at least 8, not 7",
        "append --device gpu": "the engine runs on cpu, cuda or cuda:1",
        "append --dtype fp8": "invalid choice: 'fp8'",
        "append --block-size 1": "must be at least 2, not 1",
        "attention --device gpu": "the engine runs on cpu, cuda or cuda:1",
        "attention --shapes 64x1024": "invalid shape",
        "plot nowhere.json chart.png": "cannot be read",
    },
    "roseinfer.benchmark_scheduler": {**_SERVING, "--mode ofline": "invalid choice: 'ofline'"},
    "roseinfer.benchmark_streaming": {**_SERVING, **_STREAMING},
    "tests.mutants": {
        "key-and-valeu-swapped": "no mutant is called",
        "--seeds 0": "must be at least 1, not 0",
        "--quik": "did you mean --quick?",
        "--write-docs nowhere.md": "nowhere.md cannot be read",
        "--targets a:B": "use it with --false-alarms",
        f"--false-alarms 1 --targets {_KV}:GroupedManger": "did you mean GroupedManager?",
    },
}
RUN = """
    import contextlib, importlib, io, json, os, sys

    HOMES = {{
        "roseinfer": "roseinfer.cli",
        "roseinfer.bench": "roseinfer.bench.__main__",
        "tests.mutants": "tests.mutants.command",
    }}
    os.chdir({folder!r})
    results = []
    for command, words in {mistakes!r}:
        module = importlib.import_module(HOMES.get(command, command))
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                status = module.main(words.split())
            except SystemExit as ended:
                status = ended.code
        results.append((status, errors.getvalue(), "torch" in sys.modules))
    print(json.dumps(results))
"""


def test_wrong_arguments_are_rejected_before_torch_is_imported(tmp_path: Path) -> None:
    expected = {
        (command, words): message
        for command, each in WRONG_ARGUMENTS.items()
        for words, message in each.items()
    }
    results = json.loads(run_python(RUN.format(folder=str(tmp_path), mistakes=list(expected))))
    for (command, words), (status, error, torch) in zip(expected, results, strict=True):
        assert status == (4 if error.startswith("ERROR: ") else 2), (command, words)
        assert expected[command, words] in error, (command, words)
        assert not torch, (command, words)
    assert not list(tmp_path.iterdir())


def test_wrong_pytest_options_are_rejected_before_torch_is_imported(tmp_path: Path) -> None:
    """A misspelled option is rejected before conftest.py is imported, which may import torch."""
    for folder, imports in (("plain", ""), ("heavy", "import torch")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "conftest.py").write_text(imports)
    mistakes = {
        "--roseinfer-profle=dev": "--roseinfer-profle=dev; did you mean --roseinfer-profile?",
        "--roseinfer-profile=nightl": "did you mean nightly?",
        "--roseinfer-examples=0": "must be at least 1",
        f"--roseinfer-target={_KV}:GroupedManger": "did you mean GroupedManager?",
        "--roseinfer-target=no.where:Cache": "there is no module no.where",
        "--roseinfer-report=kv.text": "must end in .json or .html",
        "--roseinfer-update-tpot": "add --roseinfer-tpot FILE",
    }
    output = run_python(
        f"""
        import contextlib, io, json, os, sys
        import pytest

        os.chdir({str(tmp_path)!r})
        results = {{}}
        for mistake in {list(mistakes)}:
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                folder = "heavy" if "profle" in mistake else "plain"
                status = int(pytest.main([mistake, folder]))
            results[mistake] = status, errors.getvalue(), "torch" in sys.modules
        print(json.dumps(results))
        """
    )
    for mistake, (status, error, torch) in json.loads(output.splitlines()[-1]).items():
        assert (status, torch) == (4, False), mistake
        assert mistakes[mistake] in error
