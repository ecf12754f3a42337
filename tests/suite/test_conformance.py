"""``conformance()`` and the suite: accepted and refused adapters, marks and replacements."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    FastPath,
    History,
    KVCacheAdapter,
    conformance,
    run_history,
)
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.capabilities.writes import Append
from tests.capabilities.caches.list_cache import ListCache
from tests.tutorials.printed import list_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from tests.project import Project

SHORT_SEARCH = ("--roseinfer-examples=15", "--roseinfer-seed=1")
TESTS = 5


@pytest.fixture(autouse=True)
def _keep_the_kernel_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the kernel runtime, which ``conformance()`` would choose for the whole process."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.slow
def test_suite_needs_no_file_and_lists_every_target(project: Project) -> None:
    """``pytest``, unlike ``python -m pytest``, does not import from its working folder."""
    for name in ("one", "two"):
        (project.path / name).mkdir()
        (project.path / name / "caches.py").write_text(list_cache().partition("TestListCache")[0])
    targets = [f"--roseinfer-target={name}.caches:ListCache" for name in ("one", "two")]
    arguments = ["--pyargs", "pytest_roseinfer.suite", "-k", "histories", *targets, *SHORT_SEARCH]
    process = subprocess.run(
        [Path(sys.executable).with_name("pytest"), "-p", "no:cacheprovider", *arguments],
        cwd=project.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == pytest.ExitCode.OK, process.stdout + process.stderr
    assert f"2 passed, {2 * (TESTS - 1)} deselected" in process.stdout
    assert "= roseinfer: one.caches:ListCache =" in process.stdout
    assert "= roseinfer: two.caches:ListCache =" in process.stdout


@pytest.mark.slow
def test_known_failure_can_be_marked_xfail_and_still_runs(project: Project) -> None:
    """The replacement of a shipped test does not run; only its marks count."""
    project.copy_caches()
    project.write(
        test_mine="""
            import pytest
            from caches.adversaries import WritesNothing
            from caches.paged_cache import PagedCache
            from pytest_roseinfer import conformance

            class TestBroken(conformance(WritesNothing)):
                @pytest.mark.xfail(reason="writes nothing")
                def test_histories(self):
                    raise SystemExit("this must not run")

            class TestFine(conformance(PagedCache)):
                @pytest.mark.xfail(reason="was broken once", strict=True)
                def test_histories(self):
                    assert False
        """
    )
    result = project.pytest("-k", "histories", "-rxX", *SHORT_SEARCH)
    result.assert_outcomes(xfailed=1, failed=1, deselected=2 * (TESTS - 1))
    result.stdout.fnmatch_lines(["*XPASS(strict)*was broken once", "XFAIL *- writes nothing*"])


def replace_tests(**tests: Any) -> type:
    return type("TestMine", (conformance(ListCache),), tests)


def empty_test(self: object) -> None:
    """Check nothing."""


@pytest.mark.skip(reason="slow")
def skipped_test(self: object) -> None: ...


@pytest.mark.xfail
def xfail_without_reason(self: object) -> None: ...


@pytest.mark.parametrize("own", [empty_test, None, skipped_test, xfail_without_reason])
def test_shipped_test_cannot_be_replaced(own: object) -> None:
    with pytest.raises(TypeError, match="test_histories is a test of pytest_roseinfer and cannot"):
        replace_tests(test_histories=own)


@pytest.mark.xfail(reason="hangs", run=False)
def xfail_without_running(self: object) -> None: ...


def test_xfail_must_not_stop_a_test_from_running() -> None:
    with pytest.raises(TypeError, match="test_histories is a test of pytest_roseinfer and cannot"):
        replace_tests(test_histories=xfail_without_running)


@pytest.mark.parametrize("part", ["adapter", "_search", "shipped"])
def test_attributes_of_the_shipped_tests_cannot_be_replaced(part: str) -> None:
    with pytest.raises(TypeError, match=f"TestMine replaces {part}, which the tests of"):
        replace_tests(**{part: ListCache})


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "mark",
    [
        "pytest.mark.skip(reason='slow')",
        "pytest.mark.skipif(True, reason='slow')",
        "pytest.mark.xfail",
        "pytest.mark.xfail(reason='hangs', run=False)",
    ],
)
@pytest.mark.parametrize("mark_style", ["decorator", "pytestmark"])
def test_shipped_tests_cannot_be_skipped_by_a_mark(
    project: Project, mark: str, mark_style: str
) -> None:
    decorator_line, body_line = (
        (f"@{mark}", "pass") if mark_style == "decorator" else ("", f"pytestmark = {mark}")
    )
    project.copy_caches()
    project.write(
        test_mine=f"""
            import pytest
            from caches.adversaries import WritesNothing
            from pytest_roseinfer import conformance

            {decorator_line}
            class TestBroken(conformance(WritesNothing)):
                {body_line}
        """
    )
    result = project.pytest(*SHORT_SEARCH)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*TestBroken*cannot be marked*deselect it with -k, -m or --deselect*"]
    )


def test_all_tests_can_be_marked_xfail_with_a_reason(project: Project) -> None:
    project.copy_caches()
    project.write(
        test_mine="""
            import pytest
            from caches.adversaries import WritesNothing
            from pytest_roseinfer import conformance

            @pytest.mark.xfail(reason="writes nothing")
            class TestBroken(conformance(WritesNothing)):
                pass
        """
    )
    project.pytest("-k", "histories", *SHORT_SEARCH).assert_outcomes(
        xfailed=1, deselected=TESTS - 1
    )


def test_shipped_test_cannot_be_replaced_by_a_base_class() -> None:
    class EmptyTests:
        test_one_batch_equals_its_split_in_two = empty_test

    with pytest.raises(TypeError, match="test_one_batch_equals_its_split_in_two is a test of"):
        type("TestMine", (EmptyTests, conformance(ListCache)), {})


def test_own_tests_may_be_added() -> None:
    with_own_test = replace_tests(test_mine=empty_test)
    assert vars(with_own_test)["test_mine"] is empty_test
    assert type("TestMore", (with_own_test,), {"test_more": empty_test})


def test_missing_methods_of_an_adapter_are_named() -> None:
    class Empty(KVCacheAdapter):
        def make(self, spec: object) -> None: ...

    with pytest.raises(TypeError, match="Empty must define append, peek"):
        conformance(Empty)
    with pytest.raises(TypeError, match="takes a subclass of KVCacheAdapter, not <"):
        conformance(ListCache())  # type: ignore[call-overload]


def test_append_many_replaces_append() -> None:
    class Many(ListCache):
        append = KVCacheAdapter.append

        def append_many(
            self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
        ) -> None:
            assert counts == [1] * len(seqs)
            ListCache.append(self, seqs, key, value)

    class Swaps(Many):
        def append_many(
            self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
        ) -> None:
            super().append_many(seqs[::-1], counts, key, value)

    refuse_mistakes(Many)
    history = History(CacheSpec(), (Append((0, 1)), Append((1, 0))))
    run_history(Many, history)
    with pytest.raises(Divergence):
        run_history(Swaps, history)


def test_append_is_required_without_append_many() -> None:
    class WithoutAppend(ListCache):
        append = KVCacheAdapter.append

    with pytest.raises(TypeError, match=r"WithoutAppend must define append$"):
        refuse_mistakes(WithoutAppend)
    with pytest.raises(Divergence, match="WithoutAppend must define append"):
        run_history(WithoutAppend, History(CacheSpec(), (Append((0,)),)))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("slow", "is 'slow': write FastPath(equals='slow')"),
        (None, "is None: write FastPath(equals=...)"),
        (FastPath(equals="slow", runs_with=[{"fuse": 1}]), "names fuse, which option_choices has"),
        (FastPath(equals="slow", never_with=[{"fuse": 1}]), "names fuse, which option_choices has"),
        (FastPath(equals="slow", aims=[{"fuse": 1}]), "names fuse, which option_choices has"),
        (
            FastPath(equals="slow", never_with=[{"fused": 1}], aims=[{}]),
            "has an aim, {}, that excludes it: it is a path which fused=1 rules out",
        ),
    ],
)
def test_invalid_path_is_named_with_its_remedy(path: object, message: str) -> None:
    adapter = type(
        "Mine", (ListCache,), {"paths": {"fast": path}, "option_choices": {"fused": (1,)}}
    )
    with pytest.raises(TypeError, match=re.escape(f"Mine.paths['fast'] {message}")):
        conformance(adapter)


def test_invalid_arguments_of_a_path_are_refused() -> None:
    with pytest.raises(TypeError, match="equals=True: expected the name of a slow path"):
        FastPath(equals=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected several settings, as in \[{'fused': 0}\]"):
        FastPath(equals="slow", never_with={"fused": 0})  # type: ignore[arg-type]


def test_cache_may_count_paths_without_showing_tables() -> None:
    class Counting(ListCache):
        paths: ClassVar[Mapping[str, FastPath]] = {"rows": FastPath(equals="row")}

        def make(self, spec: CacheSpec) -> None:
            super().make(spec)
            self.counts: Counter[str] = Counter()

        def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
            super().append(seqs, key, value)
            self.counts["rows"] += 1

        def path_counts(self) -> Mapping[str, int]:
            return self.counts

    assert run_history(Counting, History(CacheSpec(), (Append((0, 1)),))) == {"rows": 1}


@pytest.mark.slow
def test_file_may_test_two_adapters_and_one_of_them_twice(project: Project) -> None:
    """Hypothesis refuses a test that runs as a method of two classes."""
    project.copy_caches()
    project.write(
        test_mine="""
            from caches.list_cache import ListCache
            from caches.paged_cache import PagedCache
            from pytest_roseinfer import conformance

            TestList = conformance(ListCache)
            TestPaged = conformance(PagedCache)
            TestPagedAgain = conformance(PagedCache)
        """
    )
    result = project.pytest("-k", "histories or permuting", *SHORT_SEARCH)
    result.assert_outcomes(passed=6, deselected=9)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*= roseinfer: caches.paged*", "30 histories *"])


def test_no_shipped_test_passes_without_the_plugin(project: Project) -> None:
    project.copy_caches()
    project.write(
        test_it="""
            from caches.list_cache import ListCache
            from pytest_roseinfer import conformance

            TestIt = conformance(ListCache)
        """
    )
    result = project.pytest("-p", "no:roseinfer")
    result.assert_outcomes(failed=3, skipped=2)
    result.stdout.fnmatch_lines(["pytest plugin roseinfer is off (-p no:roseinfer, *"])
