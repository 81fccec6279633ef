"""Linear layers of a decode step on Hopper: against the separate ops, and what must hold between calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.hopper_linear import (
    HopperTile,
    choose_tile,
    hopper_linear,
    hopper_linear_parts,
    plan_hopper_linear,
    serves_shape,
    token_boxes,
)
from tritonllm.kernels.reference import linear
from tritonllm.testing.tensors import Draw, bits
from tritonllm.testing.tolerances import tolerance

needs_hopper = pytest.mark.skipif(
    not serves_shape(64, torch.bfloat16, torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="needs a Hopper GPU: Gluon has no interpreter",
)
SEEDS = st.integers(0, 2**31)
TOKENS = st.one_of(st.integers(1, 300), st.sampled_from([1, 16, 63, 64, 65, 127, 128, 129, 192, 256]))
COLUMNS = st.sampled_from([8, 64, 72, 136, 512, 576, 1032, 2048])  # some that fill no step
OUTPUTS = st.sampled_from([8, 24, 64, 72, 200, 1024])
PADDING = st.sampled_from([0, 8, 64])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16])


class Layer:
    """Inputs of one call; x may be rows of something wider, whose rest is NaN."""

    def __init__(
        self, seed: int, tokens: int, columns: int, outputs: int, padding: int, dtype: torch.dtype, bias: bool,
        gated: bool, device: torch.device, activation: str = "silu",
    ) -> None:  # fmt: skip
        draw = Draw(seed, device)
        rows = outputs * (2 if gated else 1)
        self.x = draw.rows(tokens, columns, padding, dtype)
        self.weight = draw.normal(rows, columns, dtype=dtype, scale=columns**-0.5)
        self.bias = draw.normal(rows, dtype=dtype) if bias else None
        self.gated = gated
        self.activation = activation
        torch.cuda.synchronize()  # parameters are read before the previous kernel has ended

    def expected(self) -> torch.Tensor:
        """The reference on a CPU, where a matrix product never sums in less than fp32."""
        bias = None if self.bias is None else self.bias.cpu()
        out = linear.skinny_linear(
            self.x.cpu(), self.weight.cpu(), bias=bias, gated=self.gated, activation=self.activation
        )
        return out.to(self.x.device)

    def run(self, tile: HopperTile | None = None) -> torch.Tensor:
        if tile is None:
            options = {"gated": self.gated, "activation": self.activation}
            return hopper_linear(self.x, self.weight, bias=self.bias, **options)
        outputs = self.weight.shape[0] // (2 if self.gated else 1)
        out = torch.empty(self.x.shape[0], outputs, dtype=self.x.dtype, device=self.x.device)
        plan_hopper_linear(self.x, self.weight, out, bias=self.bias, gated=self.gated, tile=tile).run()
        return out


@needs_hopper
@given(
    seed=SEEDS, tokens=TOKENS, columns=COLUMNS, outputs=OUTPUTS, padding=PADDING, dtype=DTYPES, bias=st.booleans(),
    gated=st.booleans(),
)  # fmt: skip
def test_matches_the_separate_ops(seed, tokens, columns, outputs, padding, dtype, bias, gated, device):
    layer = Layer(seed, tokens, columns, outputs, padding, dtype, bias, gated, device)
    out = layer.run()
    assert out.is_contiguous()
    torch.testing.assert_close(out, layer.expected(), **tolerance("hopper_linear", dtype))


@needs_hopper
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@given(seed=SEEDS, tokens=TOKENS, outputs=OUTPUTS, dtype=DTYPES, bias=st.booleans())
def test_gelu_in_place_of_silu(activation, seed, tokens, outputs, dtype, bias, device):
    layer = Layer(seed, tokens, 512, outputs, 0, dtype, bias, True, device, activation)
    torch.testing.assert_close(layer.run(), layer.expected(), **tolerance("hopper_linear", dtype))


@needs_hopper
@given(seed=SEEDS, tokens=TOKENS, columns=COLUMNS, outputs=OUTPUTS, padding=PADDING, dtype=DTYPES, bias=st.booleans())
def test_parts_add_up(seed, tokens, columns, outputs, padding, dtype, bias, device):
    """To what a layer in one piece gives before it is rounded; the bias is in one of them."""
    layer = Layer(seed, tokens, columns, outputs, padding, dtype, bias, False, device)
    parts = hopper_linear_parts(layer.x, layer.weight, bias=layer.bias)
    splits = choose_tile(tokens, outputs, False, True).splits
    assert parts.shape == (splits, tokens, outputs)
    assert parts.dtype == torch.float32
    exact = layer.x.double() @ layer.weight.double().T
    if layer.bias is not None:
        exact += layer.bias.double()
    torch.testing.assert_close(parts.double().sum(0), exact, rtol=1e-4, atol=1e-4)


@needs_hopper
@pytest.mark.parametrize("gated", [False, True])
@given(
    seed=SEEDS, tokens=TOKENS, columns=COLUMNS, outputs=OUTPUTS, token_tile=st.sampled_from([64, 128]),
    row_tile=st.sampled_from([8, 16, 32, 64]), stages=st.sampled_from([2, 3, 6]),
)  # fmt: skip
def test_every_tile_gives_the_same_bits(seed, tokens, columns, outputs, token_tile, row_tile, stages, gated, device):
    assume(outputs >= 8)
    layer = Layer(seed, tokens, columns, outputs, 0, torch.bfloat16, True, gated, device)
    assert torch.equal(bits(layer.run(HopperTile(token_tile, row_tile, stages))), bits(layer.run()))


@needs_hopper
@given(seed=SEEDS, tokens=st.integers(2, 200), columns=COLUMNS, outputs=OUTPUTS, gated=st.booleans(), row=SEEDS)
def test_a_row_depends_on_itself_alone(seed, tokens, columns, outputs, gated, row, device):
    """Other rows may be anything, NaN too, and it keeps its bits; in parts as well."""
    layer = Layer(seed, tokens, columns, outputs, 0, torch.bfloat16, False, gated, device)
    row %= tokens
    alone = layer.x[row].clone()
    out = layer.run()[row]
    parts = None if gated else hopper_linear_parts(layer.x, layer.weight)[:, row]
    layer.x.fill_(float("nan"))
    layer.x[row] = alone
    again = layer.run()
    assert torch.equal(bits(again[row]), bits(out))
    assert again.isnan().sum() == (tokens - 1) * outputs
    if parts is not None:
        assert torch.equal(bits(hopper_linear_parts(layer.x, layer.weight)[:, row]), bits(parts))


@needs_hopper
@pytest.mark.parametrize("tokens", [5, 9, 24, 64, 100, 200])
def test_nothing_beside_the_output_is_written(tokens, device):
    layer = Layer(1, tokens, 520, 72, 0, torch.bfloat16, False, False, device)
    wide = torch.full((tokens + 2, 100), 7.0, dtype=torch.bfloat16, device=device)
    plan_hopper_linear(layer.x, layer.weight, wide[1:-1, 8:80]).run()
    torch.testing.assert_close(wide[1:-1, 8:80], layer.expected(), **tolerance("hopper_linear", torch.bfloat16))
    wide[1:-1, 8:80] = 7.0
    assert (wide == 7.0).all()


@needs_hopper
def test_rows_may_be_far_apart(device):
    """The third begins 2^31 elements behind the first."""
    layer = Layer(1, 3, 520, 72, 0, torch.bfloat16, False, False, device)
    out = torch.empty(2**31 + 72, dtype=torch.bfloat16, device=device).as_strided((3, 72), (2**30, 1))
    plan_hopper_linear(layer.x, layer.weight, out).run()
    torch.testing.assert_close(out.contiguous(), layer.expected(), **tolerance("hopper_linear", torch.bfloat16))


@needs_hopper
@pytest.mark.parametrize("form", ["whole", "gated", "parts"])
def test_sums_longer_than_what_is_in_flight(form, device):
    """33 steps, the last of 8 columns: tiles have fewer stages, and parts do not divide it."""
    layer = Layer(2, 100, 2056, 200, 0, torch.bfloat16, True, form == "gated", device)
    if form == "parts":
        parts = hopper_linear_parts(layer.x, layer.weight, bias=layer.bias)
        assert len(parts) > 1
        exact = layer.x.double() @ layer.weight.double().T + layer.bias.double()
        torch.testing.assert_close(parts.double().sum(0), exact, rtol=1e-4, atol=1e-4)
    else:
        assert choose_tile(100, 200, layer.gated, False).stages < 33
        torch.testing.assert_close(layer.run(), layer.expected(), **tolerance("hopper_linear", torch.bfloat16))


@needs_hopper
def test_a_chain_of_them_equals_one_at_a_time(device):
    """Each starts while the one before it runs, and must not read its output before it is there."""
    draw = Draw(3, device)
    weights = [draw.normal(1024, 1024, dtype=torch.bfloat16, scale=1024**-0.5) for _ in range(40)]
    x = draw.normal(48, 1024, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    waited = x
    for weight in weights:
        waited = hopper_linear(waited, weight)
        torch.cuda.synchronize()
    outs = torch.empty(len(weights), *x.shape, dtype=x.dtype, device=device)
    plans = [
        plan_hopper_linear(source, weight, out)
        for source, weight, out in zip([x, *outs[:-1]], weights, outs, strict=True)
    ]
    graph = torch.cuda.CUDAGraph()  # launched one by one, each would have ended before the next
    with torch.cuda.graph(graph):
        for plan in plans:
            plan.run()
    for _ in range(20):
        outs.fill_(float("nan"))  # or what is read too early would be the right output of the round before
        graph.replay()
        assert torch.equal(bits(outs[-1]), bits(waited))


@given(tokens=st.integers(1, 300), tile=st.sampled_from([64, 128]))
def test_boxes_reach_no_further_than_the_tokens(tokens, tile):
    """But for fewer than fill a swizzle; they cover a tile's tokens, and have room in it."""
    box, boxes = token_boxes(tokens, tile)
    assert box <= max(tokens, 8)
    assert min(tokens, tile) <= box * boxes <= tile
    assert tile % box == 0


def test_on_a_cpu_it_is_the_reference():
    x, weight, bias = torch.randn(3, 8), torch.randn(16, 8), torch.randn(16)
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(hopper_linear(x, weight, bias=bias), expected)
    torch.testing.assert_close(hopper_linear_parts(x, weight, bias=bias).sum(0), expected)
    gate, up = expected.chunk(2, 1)
    torch.testing.assert_close(hopper_linear(x, weight, bias=bias, gated=True), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("x", "weight", "out", "message"),
    [
        ((4, 12), (16, 12), (4, 16), "rows at multiples of 16 bytes, not bfloat16[4, 12]"),
        ((4, 16), (16, 8), (4, 16), "weight must be contiguous [N, 16]"),
        ((4, 16), (16, 16), (4, 8), "out does not fit"),
        ((4, 16), (16, 16), (3, 16), "out does not fit"),
        ((4, 16), (16, 16), (2, 4, 16), "does not fit out"),
    ],
)
def test_refuses_what_does_not_fit(x, weight, out, message):
    def meta(shape: tuple[int, ...]) -> torch.Tensor:
        dtype = torch.float32 if len(shape) == 3 else torch.bfloat16
        return torch.empty(shape, dtype=dtype, device="meta")

    with pytest.raises(KernelError) as error:
        plan_hopper_linear(meta(x), meta(weight), meta(out))
    assert message in str(error.value)
