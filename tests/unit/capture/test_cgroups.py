"""Control groups as Linux writes them down, made in a folder."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from memfit.capture.cgroups import room_in_cgroups

MIB = 2**20
HELD = 100 * MIB  # by the process itself
NO_LIMIT_V1 = 9223372036854771712


def group(folder: Path, limit: int | str, used: int = 0, file_pages: int = 0, first: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    of = "total_" if first else ""
    (folder / "memory.stat").write_text(f"anon 7\n{of}inactive_file {file_pages // 2}\n{of}active_file {file_pages // 2}\nfile 1\n")


def process_in(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert room_in_cgroups(HELD, tmp_path) == inf
    process_in(tmp_path, "0::/user.slice/session.scope")
    assert room_in_cgroups(HELD, tmp_path) == inf


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    process_in(tmp_path, "0::/")
    group(tmp_path / "sys/fs/cgroup", 512 * MIB, used=HELD)
    assert room_in_cgroups(HELD, tmp_path) == 512 * MIB


def test_a_unit_of_systemd_is_below_the_top(tmp_path: Path) -> None:
    process_in(tmp_path, "0::/user.slice/run-1.scope")
    group(tmp_path / "sys/fs/cgroup/user.slice", "max")
    group(tmp_path / "sys/fs/cgroup/user.slice/run-1.scope", 300 * MIB)
    assert room_in_cgroups(HELD, tmp_path) == 300 * MIB


@pytest.mark.parametrize("first", [True, False], ids=["v1", "v2"])
def test_the_lowest_limit_of_all_parents_counts(tmp_path: Path, first: bool) -> None:
    top = tmp_path / "sys/fs/cgroup" / ("memory" if first else "")
    process_in(tmp_path, "5:cpu,cpuacct:/elsewhere", f"{'4:memory' if first else '0:'}:/outer/inner")
    group(top / "outer/inner", NO_LIMIT_V1 if first else "max", first=first)
    group(top / "outer", 400 * MIB, first=first)
    group(top, 900 * MIB, first=first)
    group(top / "elsewhere", MIB, first=first)
    assert room_in_cgroups(HELD, tmp_path) == 400 * MIB


@pytest.mark.parametrize("first", [True, False], ids=["v1", "v2"])
def test_what_others_in_the_group_hold_is_not_there_for_us(tmp_path: Path, first: bool) -> None:
    top = tmp_path / "sys/fs/cgroup" / ("memory" if first else "")
    process_in(tmp_path, f"{'4:memory' if first else '0:'}:/job")
    group(top / "job", 1000 * MIB, used=HELD + 300 * MIB, first=first)
    assert room_in_cgroups(HELD, tmp_path) == 700 * MIB
    group(top / "job", 1000 * MIB, used=HELD + 300 * MIB, file_pages=250 * MIB, first=first)  # a cache of files gives way
    assert room_in_cgroups(HELD, tmp_path) == 950 * MIB
    group(top / "job", 200 * MIB, used=HELD + 300 * MIB, first=first)
    assert room_in_cgroups(HELD, tmp_path) == 0


def test_a_first_version_beside_a_second_without_memory(tmp_path: Path) -> None:
    process_in(tmp_path, "9:name=systemd:/", "4:memory:/api/job", "0::/")
    (tmp_path / "sys/fs/cgroup/unified").mkdir(parents=True)
    group(tmp_path / "sys/fs/cgroup/memory/api/job", 250 * MIB, first=True)
    assert room_in_cgroups(HELD, tmp_path) == 250 * MIB


def test_a_path_of_the_host_that_a_container_cannot_see(tmp_path: Path) -> None:
    process_in(tmp_path, "4:memory:/docker/0123")
    group(tmp_path / "sys/fs/cgroup/memory", 128 * MIB, used=HELD, first=True)
    assert room_in_cgroups(HELD, tmp_path) == 128 * MIB
