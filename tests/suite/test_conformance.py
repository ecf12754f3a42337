"""``conformance()`` and the suite: what they accept, what they refuse, and that they are easy."""

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

FEW = ("--roseinfer-examples=15", "--roseinfer-seed=1")
TESTS = 5


@pytest.fixture(autouse=True)
def _keep_the_kernel_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """``conformance()`` chooses one for the process; that of these tests has others to run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_the_suite_needs_no_file_and_hides_no_target(project: Project) -> None:
    """``pytest``, unlike ``python -m pytest``, does not import from the folder it is started in."""
    for name in ("one", "two"):
        (project.path / name).mkdir()
        (project.path / name / "caches.py").write_text(list_cache().partition("TestListCache")[0])
    targets = [f"--roseinfer-target={name}.caches:ListCache" for name in ("one", "two")]
    arguments = ["--pyargs", "pytest_roseinfer.suite", "-k", "histories", *targets, *FEW]
    done = subprocess.run(
        [Path(sys.executable).with_name("pytest"), "-p", "no:cacheprovider", *arguments],
        cwd=project.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert f"2 passed, {2 * (TESTS - 1)} deselected" in done.stdout
    assert "= roseinfer: one.caches:ListCache =" in done.stdout
    assert "= roseinfer: two.caches:ListCache =" in done.stdout


def test_a_known_failure_can_be_excused_and_still_runs(project: Project) -> None:
    """What stands in place of a shipped test is not run; only its marks count."""
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
    result = project.pytest("-k", "histories", "-rxX", *FEW)
    result.assert_outcomes(xfailed=1, failed=1, deselected=2 * (TESTS - 1))
    result.stdout.fnmatch_lines(["*XPASS(strict)*was broken once", "XFAIL *- writes nothing*"])


def replaced(**tests: Any) -> type:
    return type("TestMine", (conformance(ListCache),), tests)


def nothing(self: object) -> None:
    """This test checks nothing."""


@pytest.mark.skip(reason="slow")
def skipped(self: object) -> None: ...


@pytest.mark.xfail
def excused_for_no_reason(self: object) -> None: ...


@pytest.mark.parametrize("own", [nothing, None, skipped, excused_for_no_reason])
def test_a_shipped_test_cannot_be_replaced(own: object) -> None:
    with pytest.raises(TypeError, match="test_histories is a test of pytest_roseinfer and cannot"):
        replaced(test_histories=own)


@pytest.mark.xfail(reason="hangs", run=False)
def excused_from_running(self: object) -> None: ...


def test_a_test_that_is_excused_runs() -> None:
    with pytest.raises(TypeError, match="test_histories is a test of pytest_roseinfer and cannot"):
        replaced(test_histories=excused_from_running)


@pytest.mark.parametrize("part", ["adapter", "_search", "shipped"])
def test_nor_can_what_the_tests_are_made_of(part: str) -> None:
    with pytest.raises(TypeError, match=f"TestMine replaces {part}, which the tests of"):
        replaced(**{part: ListCache})


@pytest.mark.parametrize(
    "mark",
    [
        "pytest.mark.skip(reason='slow')",
        "pytest.mark.skipif(True, reason='slow')",
        "pytest.mark.xfail",
        "pytest.mark.xfail(reason='hangs', run=False)",
    ],
)
@pytest.mark.parametrize("how", ["decorator", "pytestmark"])
def test_nor_can_all_be_left_out_by_a_mark(project: Project, mark: str, how: str) -> None:
    before, inside = (f"@{mark}", "pass") if how == "decorator" else ("", f"pytestmark = {mark}")
    project.copy_caches()
    project.write(
        test_mine=f"""
            import pytest
            from caches.adversaries import WritesNothing
            from pytest_roseinfer import conformance

            {before}
            class TestBroken(conformance(WritesNothing)):
                {inside}
        """
    )
    result = project.pytest(*FEW)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*TestBroken*cannot be marked*deselect it with -k, -m or --deselect*"]
    )


def test_all_can_be_excused_with_a_reason(project: Project) -> None:
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
    project.pytest("-k", "histories", *FEW).assert_outcomes(xfailed=1, deselected=TESTS - 1)


def test_nor_can_it_be_replaced_by_a_class_beside_it() -> None:
    class Gutted:
        test_one_batch_equals_its_split_in_two = nothing

    with pytest.raises(TypeError, match="test_one_batch_equals_its_split_in_two is a test of"):
        type("TestMine", (Gutted, conformance(ListCache)), {})


def test_tests_of_ones_own_may_be_added() -> None:
    added = replaced(test_mine=nothing)
    assert vars(added)["test_mine"] is nothing
    assert type("TestMore", (added,), {"test_more": nothing})


def test_it_says_what_an_adapter_lacks() -> None:
    class Empty(KVCacheAdapter):
        def make(self, spec: object) -> None: ...

    with pytest.raises(TypeError, match="Empty must define append, peek"):
        conformance(Empty)
    with pytest.raises(TypeError, match="takes a subclass of KVCacheAdapter, not <"):
        conformance(ListCache())  # type: ignore[call-overload]


def test_append_many_does_for_append() -> None:
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


def test_append_is_needed_where_there_is_no_append_many() -> None:
    class Lacking(ListCache):
        append = KVCacheAdapter.append

    with pytest.raises(TypeError, match=r"Lacking must define append$"):
        refuse_mistakes(Lacking)
    with pytest.raises(Divergence, match="Lacking must define append"):
        run_history(Lacking, History(CacheSpec(), (Append((0,)),)))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("slow", "is 'slow': write FastPath(equals='slow')"),
        (None, "is None: write FastPath(equals=...)"),
        (FastPath(equals="slow", runs_with=[{"fuse": 1}]), "names fuse, which option_choices has"),
        (FastPath(equals="slow", never_with=[{"fuse": 1}]), "names fuse, which option_choices has"),
    ],
)
def test_it_says_what_a_path_lacks(path: object, said: str) -> None:
    mine = type("Mine", (ListCache,), {"paths": {"fast": path}, "option_choices": {"fused": (1,)}})
    with pytest.raises(TypeError, match=re.escape(f"Mine.paths['fast'] {said}")):
        conformance(mine)


def test_a_path_says_so_itself_where_it_can() -> None:
    with pytest.raises(TypeError, match="equals=True: expected the name of a slow path"):
        FastPath(equals=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected several settings, as in \[{'fused': 0}\]"):
        FastPath(equals="slow", never_with={"fused": 0})  # type: ignore[arg-type]


def test_a_cache_may_count_its_paths_without_showing_its_tables() -> None:
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


def test_two_adapters_and_one_adapter_twice_fit_in_one_file(project: Project) -> None:
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
    result = project.pytest("-k", "histories or permuting", *FEW)
    result.assert_outcomes(passed=6, deselected=9)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*= roseinfer: caches.paged*", "30 histories *"])


def test_without_the_plugin_nothing_passes(project: Project) -> None:
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
