import os
import resource

import pytest
import torch
from torch import nn

from kvretain import artefacts


class Config:
    model_type = "toy"


def model(seed: int = 0, size: int = 24) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(8, size), nn.Linear(size, 4, bias=False))
    made.config = Config()
    return made


def test_a_fingerprint_tells_weights_apart_and_not_dtypes():
    assert artefacts.fingerprint(model()) == artefacts.fingerprint(model())
    assert artefacts.fingerprint(model()) == artefacts.fingerprint(model().to(torch.bfloat16))
    others = {artefacts.fingerprint(m) for m in (model(), model(1), model(0, 25), model().to("meta"))}
    assert len(others) == 4
    changed = model()
    with torch.no_grad():
        changed[1].weight[0, 0] += 1
    assert artefacts.fingerprint(changed) != artefacts.fingerprint(model())


def test_the_default_place_is_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path))
    path = artefacts.own_path("gate", model())
    assert path.parent == tmp_path / "gate"
    assert path.name == f"toy-{artefacts.fingerprint(model())}.safetensors"


def test_write_and_read_round_trip(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(2, dtype=torch.bfloat16)}
    path = artefacts.write(tmp_path / "deep" / "x.safetensors", tensors, {"model": "toy"})
    got, metadata = artefacts.read(path)
    assert metadata == {"model": "toy"}
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert os.listdir(path.parent) == ["x.safetensors"]


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(Exception):  # noqa: B017 - safetensors' own
        artefacts.write(tmp_path / "x.safetensors", {"a": torch.ones(2)}, {"model": 3})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_a_digest_is_of_the_tensors():
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = artefacts.digest([one, one.to(torch.bfloat16), torch.view_as_complex(one)])
    assert found == artefacts.digest(
        [one.t().contiguous().t(), one.to(torch.bfloat16), torch.view_as_complex(one.clone())]
    )
    for other in (
        [one],
        [one, one, torch.view_as_complex(one)],
        [one + 1, one.to(torch.bfloat16), torch.view_as_complex(one)],
    ):
        assert artefacts.digest(other) != found
    assert artefacts.digest([one]) != artefacts.digest([one.reshape(1, 4)])


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        artefacts.read(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        artefacts.read(tmp_path / "bad.safetensors")


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # stands for a disk that fills up
    try:
        with pytest.raises(OSError, match=r"x\.safetensors' could not be written: .*too large"):
            artefacts.write(tmp_path / "x.safetensors", {"a": torch.ones(10_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
