from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from memfit.proof.draws import CannotReplay, DrawsRecorded, DrawsReplayed, InFloat64
from memfit.proof.shelf import Key, Shelf, same_bits

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "channel dropout": lambda x: F.dropout1d(x, 0.4),
    "noise": lambda x: x + torch.randn_like(x) * torch.rand(x.shape, dtype=torch.float32),
    "a shuffle": lambda x: x[torch.randperm(len(x))] * torch.randint(1, 4, (1,)),
    "a sample": lambda x: x * torch.bernoulli(x.sigmoid()) + torch.multinomial(x.softmax(-1), 3).sum(),
    "gumbel": lambda x: F.gumbel_softmax(x, tau=0.5),
    "native dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.3),
}


def both(draw: Callable[[torch.Tensor], torch.Tensor], replay: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    x, recorder = torch.randn(8, 16), DrawsRecorded(Shelf())
    state = torch.get_rng_state()
    with recorder:
        single = draw(x)
    assert not recorder.unreplayable
    torch.set_rng_state(state)
    with InFloat64(), DrawsReplayed(recorder.shelf if replay else Shelf()):
        return single, draw(x.double())


@pytest.mark.parametrize("name", DRAWS)
def test_float64_gets_the_draws_of_float32(name: str) -> None:
    single, double = both(DRAWS[name])
    assert double.dtype is torch.float64
    assert torch.allclose(single.double(), double, rtol=1e-5, atol=1e-6)


def test_left_alone_float64_draws_otherwise() -> None:
    x = torch.randn(8, 16)
    torch.manual_seed(1)
    single = DRAWS["noise"](x)
    torch.manual_seed(1)
    assert not torch.allclose(single.double(), DRAWS["noise"](x.double()), rtol=1e-2)


def test_a_run_that_draws_more_or_otherwise_is_refused() -> None:
    with pytest.raises(CannotReplay, match=r"its aten.bernoulli_.float draws otherwise than before"):
        both(DRAWS["dropout"], replay=False)


def test_attention_without_dropout_draws_nothing_and_a_draw_inside_an_op_is_noticed() -> None:
    recorder, x = DrawsRecorded(Shelf()), torch.randn(1, 1, 8, 16)
    with recorder:
        F.scaled_dot_product_attention(x, x, x)
    assert not recorder.unreplayable and not list(recorder.shelf)
    with recorder:
        F.rrelu(x, training=True)
    assert recorder.unreplayable == "aten.rrelu_with_noise.default"


def test_constants_casts_and_factories_are_widened_and_targets_are_not() -> None:
    x, constant, kept = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 2), torch.zeros(3, 2)
    with InFloat64():
        assert (x @ constant).dtype is torch.float64 and x.float().dtype is torch.float64
        assert torch.zeros(2, dtype=torch.bfloat16).dtype is torch.float64 and torch.zeros(2, dtype=torch.int32).dtype is torch.int32
        kept.copy_(x @ constant)
    assert kept.dtype is torch.float32 and constant.dtype is torch.float32


def test_a_shelf_gives_back_bits_strides_and_the_last_value() -> None:
    shelf, key = Shelf(), Key("parameters", "weight")
    shelf.put(Key("buffers", "first"), torch.tensor([float("nan"), -0.0]))
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (image, torch.tensor(True), torch.randn(0, 3), torch.randn(5).bfloat16()):
        shelf.put(key, tensor)
        assert same_bits(shelf.get(key), tensor) and shelf.get(key).stride() == tensor.stride()
    assert same_bits(shelf.get(Key("buffers", "first")), torch.tensor([float("nan"), -0.0]))
