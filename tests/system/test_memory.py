"""Claims about the memory that is available."""

from types import SimpleNamespace

from hf_vit.system import memory


def test_the_memory_that_is_available_is_the_least_that_any_group_above_leaves(tmp_path, monkeypatch):
    def group(path, **files):
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / path / f"memory.{name}").write_text(text)

    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    (tmp_path / "proc" / "self").mkdir(parents=True)
    groups = tmp_path / "proc" / "self" / "cgroup"
    assert memory.available_memory(tmp_path) == 10_000
    groups.write_text("0::/job/step\n")
    group("sys/fs/cgroup/job", max="5000", current="4000", stat="anon 3000\ninactive_file 600\n")
    group("sys/fs/cgroup/job/step", max="max", current="4000", stat="anon 3000\n")
    assert memory.available_memory(tmp_path) == 1600
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "4")
        assert memory.available_memory(tmp_path) == 400
    groups.write_text("4:memory:/the/hosts/path\n0::/the/hosts/path\n")  # in a container
    group("sys/fs/cgroup", max="3000", current="2500", stat="inactive_file 100\n")
    assert memory.available_memory(tmp_path) == 600
