"""Claims about the memory that is available."""

from types import SimpleNamespace

from hf_vit.system import memory


def group(root, path, **files):
    (root / path).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / path / name.replace("_", ".", 1) if name.startswith("memory") else root / path / name).write_text(
            str(text)
        )


def test_the_memory_that_is_available_is_the_least_that_any_group_above_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    (tmp_path / "proc" / "self").mkdir(parents=True)
    groups = tmp_path / "proc" / "self" / "cgroup"
    assert memory.available_memory(tmp_path) == 10_000
    groups.write_text("0::/job/step\n")
    group(
        tmp_path,
        "sys/fs/cgroup/job",
        memory_max=5000,
        memory_current=4000,
        memory_stat="anon 3000\ninactive_file 600\n",
    )
    group(tmp_path, "sys/fs/cgroup/job/step", memory_max="max", memory_current=4000, memory_stat="anon 3000\n")
    assert memory.available_memory(tmp_path) == 1600
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.available_memory(tmp_path) == 400
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    groups.write_text("4:memory:/the/hosts/path\n0::/the/hosts/path\n")  # in a container
    group(tmp_path, "sys/fs/cgroup", memory_max=3000, memory_current=2500, memory_stat="inactive_file 100\n")
    assert memory.available_memory(tmp_path) == 600
