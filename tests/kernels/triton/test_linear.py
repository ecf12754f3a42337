"""Linear layers on Triton kernels against the same in float64, and nothing read beyond."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu as torch_gelu

from roseinfer.kernels.triton.linear import (
    gelu,
    linear,
    num_k_splits,
    split_k_linear,
    split_k_matmul,
    splits_evenly,
)
from roseinfer.kernels.triton.streamed import (
    silu_and_mul,
    stream_gate_up,
    stream_linear,
    stream_linear_split_k,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""For outputs of about 1, which are rounded to the dtype once."""
ROWS = [1, 16, 17, 65]
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


class Layer:
    """A layer in the middle of larger tensors that are all NaN around it."""

    def __init__(
        self,
        device: str,
        rows: int,
        inputs: int,
        outputs: int,
        *,
        dtype: torch.dtype = torch.float32,
        transposed: bool = False,
    ) -> None:
        torch.manual_seed(rows + inputs)

        def within(height: int, width: int) -> torch.Tensor:
            around = torch.full((height + 2, width + 3), float("nan"), device=device, dtype=dtype)
            around[1:-1, :width] = torch.randn(height, width).to(dtype).to(device)
            return around[1:-1, :width]

        self.x = within(rows, inputs)
        weight = within(outputs, inputs).T if transposed else within(inputs, outputs)
        self.weight = weight.mul_(inputs**-0.5)
        self.bias = within(1, outputs)[0]
        self.tolerance = TOLERANCE[dtype]

    @property
    def truth(self) -> torch.Tensor:
        return self.x.double() @ self.weight.double()

    def check(self, got: torch.Tensor, want: torch.Tensor) -> None:
        assert not got.isnan().any()
        torch.testing.assert_close(got.double(), want, atol=self.tolerance, rtol=self.tolerance)


@every_dtype
@pytest.mark.parametrize("rows", ROWS)
def test_a_layer_with_a_bias(device: str, rows: int, dtype: torch.dtype) -> None:
    layer = Layer(device, rows, 96, 80, dtype=dtype)
    got = linear(layer.x, layer.weight, layer.bias)
    assert (got.shape, got.dtype) == ((rows, 80), dtype)
    layer.check(got, layer.truth + layer.bias.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [48, 64, 96, 128, 200])
def test_a_bias_is_added_in_one_way_by_every_tile(
    device: str, inputs: int, dtype: torch.dtype
) -> None:
    """Where one tile has all inputs, a compiler would begin the sums with the bias."""
    if device != "cuda":
        pytest.skip("this is about a GPU's compiler")
    layer = Layer(device, 512, inputs, 1024, dtype=dtype, transposed=True)
    x, weight, bias = layer.x, layer.weight, layer.bias
    many = linear(x, weight, bias)
    assert torch.equal(torch.cat([linear(few, weight, bias) for few in torch.split(x, 50)]), many)
    streamed = [stream_linear(few, weight.T, bias) for few in torch.split(x, 50)]
    assert torch.equal(torch.cat(streamed), many)


@every_dtype
def test_a_layer_and_its_activation(device: str, dtype: torch.dtype) -> None:
    """The rows reach where it is flat, and where the approximation by a tanh matters."""
    layer = Layer(device, 3, 64, 33, dtype=dtype)
    layer.x[1] *= 30
    before = layer.truth + layer.bias.double()
    assert before.max() > 20
    assert before.min() < -20
    got = linear(layer.x, layer.weight, layer.bias, gelu=True)
    layer.check(got, torch_gelu(before, approximate="tanh"))


@every_dtype
def test_the_same_activation_behind_a_product_of_many_rows(device: str, dtype: torch.dtype) -> None:
    layer = Layer(device, 3, 64, 33, dtype=dtype)
    layer.x[1] *= 30
    whole = linear(layer.x, layer.weight, layer.bias)
    both = linear(layer.x, layer.weight, layer.bias, gelu=True)
    torch.testing.assert_close(gelu(whole), both, atol=0, rtol=0)


@every_dtype
def test_many_rows_in_the_same_parts(device: str, dtype: torch.dtype) -> None:
    layer = Layer(device, 20, 768, 70, dtype=dtype)
    parts = num_k_splits(768, 70, 1)
    assert (parts, splits_evenly(768, parts), splits_evenly(700, 2)) == (6, True, False)
    few, many = (f(layer.x, layer.weight, parts) for f in (split_k_linear, split_k_matmul))
    assert few.shape == many.shape == (6, 20, 70)
    torch.testing.assert_close(many, few, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (5, 3), (63, 65), (130, 31)])
def test_odd_sizes(device: str, inputs: int, outputs: int, transposed: bool) -> None:
    layer = Layer(device, 2, inputs, outputs, transposed=transposed)
    layer.check(linear(layer.x, layer.weight), layer.truth)
    parts = num_k_splits(inputs, outputs, 2)
    layer.check(split_k_linear(layer.x, layer.weight, parts).sum(0), layer.truth)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("outputs", [(1 << 14) - 1, 1 << 14, (1 << 14) + 1])
def test_a_vocabulary(device: str, outputs: int) -> None:
    """Other tiles from a certain width on; the weights are an embedding's, transposed."""
    layer = Layer(device, 2, 24, outputs, transposed=True)
    layer.check(linear(layer.x, layer.weight), layer.truth)


@every_dtype
@pytest.mark.parametrize("rows", ROWS)
def test_parts_add_up(device: str, rows: int, dtype: torch.dtype) -> None:
    layer = Layer(device, rows, 300, 70, dtype=dtype)
    parts = split_k_linear(layer.x, layer.weight, num_k_splits(300, 70, rows))
    assert parts.dtype == torch.float32, "they are still to be added"
    assert len(parts) > 1
    layer.check(parts.sum(0), layer.truth)


@pytest.mark.parametrize("tiles", range(1, 14))
def test_parts_of_any_number_of_tiles(
    device: str, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part has as many tiles as the launcher allows, and the last tile is not full."""
    monkeypatch.setattr("roseinfer.kernels.triton.linear._TARGET_PROGRAMS", 1)
    layer = Layer(device, 2, tiles * 128 - 5, 20)
    parts = split_k_linear(layer.x, layer.weight, num_k_splits(tiles * 128 - 5, 20, 2))
    assert len(parts) >= tiles / 4
    layer.check(parts.sum(0), layer.truth)


@every_dtype
@pytest.mark.parametrize("rows", ROWS)
def test_a_streamed_layer(device: str, rows: int, dtype: torch.dtype) -> None:
    layer = Layer(device, rows, 300, 80, dtype=dtype, transposed=True)
    got = stream_linear(layer.x, layer.weight.T, layer.bias)
    assert (got.shape, got.dtype) == ((rows, 80), dtype)
    layer.check(got, layer.truth + layer.bias.double())


@every_dtype
@pytest.mark.parametrize("inputs", [1024, 1300])
def test_a_streamed_layer_in_parts(device: str, inputs: int, dtype: torch.dtype) -> None:
    layer = Layer(device, 17, inputs, 70, dtype=dtype, transposed=True)
    parts = stream_linear_split_k(layer.x, layer.weight.T)
    assert (len(parts), parts.dtype) == (2, torch.float32)
    layer.check(parts.sum(0), layer.truth)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (5, 3), (63, 65), (130, (1 << 14) + 1)])
def test_a_streamed_layer_of_odd_sizes(device: str, inputs: int, outputs: int) -> None:
    layer = Layer(device, 2, inputs, outputs, transposed=True)
    layer.check(stream_linear(layer.x, layer.weight.T), layer.truth)
    layer.check(stream_linear_split_k(layer.x, layer.weight.T).sum(0), layer.truth)


@pytest.mark.sampled_cases
@every_dtype
@pytest.mark.parametrize("rows", ROWS)
def test_gates_and_ups(device: str, rows: int, dtype: torch.dtype) -> None:
    layer = Layer(device, rows, 300, 160, dtype=dtype, transposed=True)
    gates, ups = layer.truth.chunk(2, 1)
    layer.check(stream_gate_up(layer.x, layer.weight.T), torch.nn.functional.silu(gates) * ups)


@every_dtype
def test_a_row_has_the_same_bits_whatever_is_beside_it(device: str, dtype: torch.dtype) -> None:
    """On a GPU; the interpreter's products are numpy's, which choose their order by the sizes."""
    if device == "cpu":
        pytest.skip("the interpreter rounds as numpy does")
    layer = Layer(device, 64, 1300, 200, dtype=dtype, transposed=True)
    weight = layer.weight.T
    for compute in (
        stream_linear,
        lambda x, w: stream_linear_split_k(x, w).transpose(0, 1),
        stream_gate_up,
    ):
        all_of_them = compute(layer.x, weight)
        for first, count in ((0, 1), (5, 1), (63, 1), (3, 16), (7, 17), (20, 40)):
            few = compute(layer.x[first : first + count], weight)
            assert torch.equal(few, all_of_them[first : first + count])


def test_more_rows_than_some_axes_of_a_grid_count(device: str) -> None:
    if device == "cpu":
        pytest.skip("the interpreter takes a minute, and has no such bound")
    both = torch.randn(70_000, 16, device=device)
    gates, ups = both.chunk(2, 1)
    torch.testing.assert_close(silu_and_mul(both), torch.nn.functional.silu(gates) * ups)
