"""The cores and the memory that control groups leave to a process, in folders as Linux shows them."""

import os
from pathlib import Path

import pytest

from parley import control_groups
from parley.engine.process_exit import describe_exit

MIB = 1 << 20
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {32 << 20} kB\n"
SECOND = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
FIRST = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime master:7 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("limit", "count", "text"),
    [
        ("max 100000", 8, "8 of 64 cores"),
        ("1600000 100000", 8, "8 of 64 cores"),
        ("250000 100000", 2, "8 of 64 cores, limited to the time of 2.5"),
        ("25000 50000", 1, "8 of 64 cores, limited to the time of 0.5"),
    ],
)
def test_threads_are_as_many_as_cores_unless_the_container_gets_less_time(tmp_path, limit, count, text):
    root = write_files(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": SECOND, "sys/fs/cgroup/cpu.max": limit + "\n"},
    )
    assert control_groups.core_count(root) == count
    assert control_groups.describe_cores(root) == text


def test_limits_of_all_groups_above_a_service_count(tmp_path):
    slices = "sys/fs/cgroup/system.slice"
    files = {
        "proc/self/cgroup": "0::/system.slice/parley.service\n",
        "proc/self/mountinfo": SECOND,
        f"{slices}/cpu.max": "300000 100000",
        f"{slices}/parley.service/cpu.max": "600000 100000",
        f"{slices}/memory.max": "max",
        f"{slices}/memory.high": "max",
        f"{slices}/memory.current": str(900 * MIB),
        f"{slices}/memory.stat": f"anon {500 * MIB}\nactive_file {MIB}\ninactive_file {MIB}\n",
        f"{slices}/parley.service/memory.max": str(1000 * MIB),
        f"{slices}/parley.service/memory.high": str(800 * MIB),
        f"{slices}/parley.service/memory.current": str(700 * MIB),
        f"{slices}/parley.service/memory.stat": (
            f"anon {90 * MIB}\nfile {610 * MIB}\nactive_file {200 * MIB}\ninactive_file {400 * MIB}\n"
        ),
    }
    root = write_files(tmp_path, files)
    assert control_groups.core_count(root) == 3
    assert (
        control_groups.free_host_memory(root) == 700 * MIB
    )  # of 800, since files that are only cached take 600 of 700


@pytest.mark.parametrize("top", ["/", "/docker/ab12"])
def test_first_version_is_read_on_a_machine_and_in_a_container(tmp_path, top):
    """A container sees its own group mounted, under the path of the machine."""
    inner = "/docker/ab12" if top == "/" else ""
    cpu, memory = f"sys/fs/cgroup/cpu,cpuacct{inner}", f"sys/fs/cgroup/memory{inner}"
    files = {
        "proc/self/cgroup": "5:memory:/docker/ab12\n4:cpu,cpuacct:/docker/ab12\n1:name=systemd:/x\n0::/\n",
        "proc/self/mountinfo": FIRST.format(top=top),
        f"{cpu}/cpu.cfs_quota_us": "400000\n",
        f"{cpu}/cpu.cfs_period_us": "100000\n",
        f"{memory}/memory.limit_in_bytes": f"{512 * MIB}\n",
        f"{memory}/memory.usage_in_bytes": f"{400 * MIB}\n",
        f"{memory}/memory.stat": f"cache 1\ntotal_active_file {100 * MIB}\ntotal_inactive_file {200 * MIB}\n",
    }
    root = write_files(tmp_path, files)
    assert control_groups.core_count(root) == 4
    assert control_groups.free_host_memory(root) == 412 * MIB
    (root / cpu / "cpu.cfs_quota_us").write_text("-1\n")
    (root / memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert control_groups.core_count(root) == 8
    assert control_groups.free_host_memory(root) == 32 << 30


def test_machine_counts_where_no_group_can_be_read(tmp_path):
    assert control_groups.core_count(tmp_path) == 8
    assert control_groups.free_host_memory(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    root = write_files(tmp_path, {"proc/self/cgroup": "nonsense", "proc/self/mountinfo": SECOND})
    assert control_groups.core_count(root) == 8
    assert control_groups.free_host_memory(root) == 32 << 30


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": SECOND, "proc/vmstat": "oom_kill 9\n"}, 9),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "proc/self/mountinfo": SECOND,
                "proc/vmstat": "oom_kill 9\n",
                "sys/fs/cgroup/a/memory.events": "low 0\noom 5\noom_kill 5\n",
                "sys/fs/cgroup/a/b/memory.events": "low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/ab12\n0::/\n",
                "proc/self/mountinfo": FIRST.format(top="/docker/ab12"),
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": SECOND}, None),
    ],
)
def test_counts_memory_kills_of_its_own_control_group_only(tmp_path, files, kills):
    assert control_groups.count_memory_kills(write_files(tmp_path, files)) == kills


def test_an_exit_is_blamed_on_memory_if_the_kernel_says_so(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": SECOND}
    group = {
        "sys/fs/cgroup/memory.max": str(512 * MIB),
        "sys/fs/cgroup/memory.high": str(MIB),
        "sys/fs/cgroup/memory.current": "0",
        "sys/fs/cgroup/memory.stat": "anon 0\n",
        "sys/fs/cgroup/memory.events": "oom_kill 3\n",
    }
    root = write_files(tmp_path, files | group)
    limit = "the limit of its control group is 512 MiB"
    endings = {
        (-9, 2): f"was killed by the kernel because memory ran out ({limit})",
        (-9, 3): "was killed by SIGKILL",
        (-9, None): "was killed by SIGKILL, perhaps for lack of memory",
        (-15, 2): "was killed by SIGTERM",
        (7, 2): "ended with exit code 7",
        (0, 2): "ended unexpectedly",
        (None, 2): "ended unexpectedly",
    }
    for (exit_code, kills), text in endings.items():
        assert describe_exit(exit_code, kills, root) == text
    # The kill has explained the first end. Somebody else killed a process that ran at that time, too.
    assert describe_exit(-9, 2, root) == "was killed by SIGKILL"
    write_files(tmp_path, {"sys/fs/cgroup/memory.events": "oom_kill 4\n"})
    assert describe_exit(-9, 2, root).startswith("was killed by the kernel because memory ran out")
