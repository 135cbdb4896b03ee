"""What pytest offers, in ranks."""

import os
import unittest
import warnings

import pytest
import torch
import torch.distributed as dist

SETUPS = []


@pytest.fixture(scope="session")
def counted(rank):
    SETUPS.append(rank)
    return len(SETUPS)


@pytest.fixture
def model(rank):
    torch.manual_seed(0)
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.ranks(2)
def test_parameters(rank, size):
    x = torch.ones(size)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * size


@pytest.mark.parametrize("expected", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 3)])
def test_sizes(expected, world_size):
    assert dist.get_world_size() == world_size == expected


@pytest.mark.ranks(2)
def test_fixtures_are_made_in_each_rank(rank, model):
    loss = model(torch.full((1, 2), float(rank))).sum()
    loss.backward()
    gradients = [torch.zeros(1, 2), torch.zeros(1, 2)]
    dist.all_gather(gradients, model.module.weight.grad)
    assert torch.equal(*gradients)
    assert gradients[0].tolist() == [[0.5, 0.5]]


@pytest.mark.ranks(2)
def test_wide_fixtures_once(counted):
    assert len(SETUPS) == counted


@pytest.mark.ranks(2)
def test_wide_fixtures_again(counted):
    assert len(SETUPS) == counted


@pytest.mark.ranks(2)
def test_raises_in_a_rank(rank):
    with pytest.raises(ValueError, match="rank"):
        raise ValueError(f"rank {rank}")


@pytest.mark.ranks(2)
def test_paths(rank, tmp_path, shared_tmp_path):
    (tmp_path / "own").write_text(str(rank))
    if rank == 0:
        (shared_tmp_path / "one").write_text("for all")
    dist.barrier()
    assert os.listdir(tmp_path) == ["own"]
    assert (shared_tmp_path / "one").read_text() == "for all"


@pytest.mark.ranks(2)
def test_capture_fixtures(rank, capsys, caplog):
    import logging

    print("caught")
    logging.getLogger("mine").warning("noted")
    assert capsys.readouterr().out == "caught\n"
    assert caplog.messages == ["noted"]


@pytest.mark.ranks(2)
def test_monkeypatch(rank, monkeypatch):
    monkeypatch.setenv("RANK", "9")
    assert os.environ["RANK"] == "9"


@pytest.mark.ranks(2)
def test_environment_is_that_of_a_job(rank):
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(rank), "2")


@pytest.mark.ranks(2, group=False)
def test_forms_the_group_itself(rank):
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


@pytest.mark.ranks(2)
def test_skip_in_the_body():
    pytest.skip("not today")


@pytest.mark.skipif("True", reason="never")
@pytest.mark.ranks(2)
def test_skip_by_mark():
    raise AssertionError


@pytest.mark.xfail(reason="known", strict=True)
@pytest.mark.ranks(2)
def test_expected_failure_on_one_rank(rank):
    assert rank == 0


@pytest.mark.xfail(reason="known", strict=True)
@pytest.mark.ranks(2)
def test_unexpected_pass():
    pass


@pytest.mark.ranks(2, device="cuda")
def test_needs_gpus(rank, rank_device):
    assert rank_device == torch.device("cuda", rank)


@pytest.mark.ranks(2)
def test_warns(rank):
    warnings.warn("from a rank", UserWarning, stacklevel=1)


@pytest.mark.ranks(2)
def test_properties(rank, record_property):
    record_property("tokens", 17)


class TestMethods:
    @pytest.mark.ranks(2)
    def test_method(self, rank):
        assert dist.get_rank() == rank


@pytest.mark.ranks(2)
class TestClass:
    def test_of_marked_class(self, world_size):
        assert world_size == 2


class TestOld(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_unittest(self):
        self.assertEqual(dist.get_world_size(), 2)


@pytest.fixture(scope="module")
def open_resource():
    yield 1


def test_plain(open_resource):
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_between(rank):
    assert dist.get_rank() == rank


def test_plain_again(open_resource):
    assert "RANK" not in os.environ


def test_fixture_outside(rank):
    raise AssertionError


@pytest.mark.ranks(0)
def test_no_ranks():
    raise AssertionError


@pytest.mark.ranks(2, devise="cuda")
def test_wrong_argument():
    raise AssertionError
