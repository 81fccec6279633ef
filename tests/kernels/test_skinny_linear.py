"""Linear layers of few tokens: against the separate ops, in every form, and what must hold between calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.launch import interpreting, supports_pdl
from tritonllm.kernels.reference import linear
from tritonllm.kernels.skinny_form import Form, gemv
from tritonllm.kernels.skinny_linear import MAX_ROWS, plan_skinny_linear, skinny_linear
from tritonllm.kernels.skinny_table import choose_form, token_block
from tritonllm.kernels.tuning_table import UNTUNED
from tritonllm.testing.tensors import Draw, bits
from tritonllm.testing.tolerances import tolerance

# numpy, under the interpreter, says so when exp overflows, which silu wants.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

EPS = 1e-5
EXAMPLES = settings(max_examples=10)  # nearly every example is another kernel to compile
SEEDS = st.integers(0, 2**31)
COLUMNS = st.sampled_from([1, 16, 33, 96, 300, 576])
OUTPUTS = st.sampled_from([1, 7, 16, 33, 48])
PADDING = st.sampled_from([0, 3, 16])
FUSED = st.fixed_dictionaries(
    {name: st.booleans() for name in ("bias", "norm", "residual", "gated")}
    | {"activation": st.sampled_from(["silu", "gelu", "gelu_tanh"])}
)
FORMS = [
    gemv(256, 4, 2),
    gemv(256, 4, 4),
    gemv(512, 4, 4),
    gemv(1024, 4, 4),
    gemv(4096, 1, 8),
    Form("direct", 8, 64, 4, split=16),
    Form("direct", 16, 256, 4, split=4),
    Form("direct", 16, 32, 4, split=4, num_stages=2),
    Form("direct", 16, 64, 4, split=4, num_stages=3),
    Form("looped", 16, 32, 4, split=4, num_stages=3),
    Form("looped", 32, 64, 4, num_stages=2),
]


@dataclass
class Layer:
    """Inputs of one call; x and the residual may be rows of something wider."""

    x: torch.Tensor
    weight: torch.Tensor
    fused: dict[str, Any]

    @classmethod
    def draw(
        cls,
        draw: Draw,
        tokens: int,
        columns: int,
        outputs: int,
        padding: int,
        dtype: torch.dtype,
        fused: dict[str, bool],
    ) -> Layer:
        rows = outputs * (2 if fused["gated"] else 1)
        weight = draw.normal(rows, columns, dtype=dtype, scale=columns**-0.5)
        arguments: dict[str, Any] = {"gated": fused["gated"], "eps": EPS}
        arguments["activation"] = fused.get("activation", "silu")
        if fused["bias"]:
            arguments["bias"] = draw.normal(rows, dtype=dtype)
        if fused["norm"]:
            arguments["norm_weight"] = draw.normal(columns, dtype=dtype)
        if fused["residual"]:
            arguments["residual"] = draw.rows(tokens, outputs, padding, dtype)
        layer = cls(draw.rows(tokens, columns, padding, dtype), weight, arguments)
        if weight.is_cuda:
            torch.cuda.synchronize()  # parameters are read before the previous kernel has ended
        return layer

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.weight.shape[0] // (2 if self.fused["gated"] else 1)

    def expected(self) -> torch.Tensor:
        """The reference on a CPU, where a matrix product never sums in less than fp32."""
        fused = {key: value.cpu() if torch.is_tensor(value) else value for key, value in self.fused.items()}
        return linear.skinny_linear(self.x.cpu(), self.weight.cpu(), **fused).to(self.x.device)

    def run(self) -> torch.Tensor:
        return skinny_linear(self.x, self.weight, **self.fused)

    def run_as(self, form: Form | None, pdl: bool | None = None) -> torch.Tensor:
        out = torch.empty(self.out_shape, dtype=self.x.dtype, device=self.x.device)
        plan_skinny_linear(self.x, self.weight, out, form=form, pdl=pdl, **self.fused).run()
        return out


@EXAMPLES
@given(
    data=st.data(), seed=SEEDS, tokens=st.integers(1, MAX_ROWS), columns=COLUMNS, outputs=OUTPUTS, padding=PADDING,
    fused=FUSED,
)  # fmt: skip
def test_matches_the_separate_ops(data, seed, tokens, columns, outputs, padding, fused, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    layer = Layer.draw(Draw(seed, device), tokens, columns, outputs, padding, dtype, fused)
    out = layer.run()
    assert out.is_contiguous()
    torch.testing.assert_close(out, layer.expected(), **tolerance("skinny_linear", dtype))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kind}-{form.block_n}x{form.split}x{form.block_k}")
@EXAMPLES
@given(data=st.data(), seed=SEEDS, columns=COLUMNS, outputs=OUTPUTS, padding=PADDING, fused=FUSED)
def test_every_form_at_any_shape(form, data, seed, columns, outputs, padding, fused, device, dtypes):
    """Whatever the table says today, every form is right where it can run: with rows and columns left over or not."""
    # Never chosen in float32, for which a step of this size takes the compiler minutes.
    fitting = [dtype for dtype in dtypes if interpreting() or form.kind != "direct" or dtype.itemsize == 2]
    dtype = data.draw(st.sampled_from(fitting))
    tokens = 1 if form.kind == "gemv" else data.draw(st.integers(1, MAX_ROWS))
    layer = Layer.draw(Draw(seed, device), tokens, columns, outputs, padding, dtype, fused)
    torch.testing.assert_close(layer.run_as(form), layer.expected(), **tolerance("skinny_linear", dtype))


@EXAMPLES
@given(data=st.data(), seed=SEEDS, tokens=st.integers(2, MAX_ROWS), columns=COLUMNS, outputs=OUTPUTS, fused=FUSED)
def test_one_row_equals_many(data, seed, tokens, columns, outputs, fused, device, dtypes):
    """A row alone may take another form, so the order of its sums may differ, and nothing else."""
    dtype = data.draw(st.sampled_from(dtypes))
    layer = Layer.draw(Draw(seed, device), tokens, columns, outputs, 0, dtype, fused)
    row = data.draw(st.integers(0, tokens - 1))
    residual = {"residual": layer.fused["residual"][row : row + 1]} if fused["residual"] else {}
    one = Layer(layer.x[row : row + 1], layer.weight, layer.fused | residual)
    torch.testing.assert_close(layer.run()[row : row + 1], one.run(), **tolerance("skinny_linear", dtype))


@EXAMPLES
@given(data=st.data(), seed=SEEDS, tokens=st.integers(1, 7), columns=COLUMNS, outputs=OUTPUTS, fused=FUSED)
def test_more_rows_change_no_bit(data, seed, tokens, columns, outputs, fused, device, dtypes):
    """Within a bucket of the same form a row's result does not depend on the rows beside it."""
    dtype = data.draw(st.sampled_from(dtypes))
    form = Form("looped", 16, 64, 4, num_stages=2) if dtype == torch.float32 else Form("direct", 16, 256, 4, split=4)
    layer = Layer.draw(Draw(seed, device), 8, columns, outputs, 0, dtype, fused)
    few = Layer(layer.x[:tokens], layer.weight, dict(layer.fused))
    if fused["residual"]:
        few.fused["residual"] = layer.fused["residual"][:tokens]
    assert torch.equal(bits(layer.run_as(form)[:tokens]), bits(few.run_as(form)))


@EXAMPLES
@given(data=st.data(), seed=SEEDS, tokens=st.integers(1, MAX_ROWS), padding=PADDING, fused=FUSED)
def test_the_residual_may_be_updated_in_place(data, seed, tokens, padding, fused, device, dtypes):
    dtype = data.draw(st.sampled_from(dtypes))
    layer = Layer.draw(Draw(seed, device), tokens, 96, 33, padding, dtype, fused | {"residual": True})
    apart = layer.run()
    residual = layer.fused["residual"]
    assert skinny_linear(layer.x, layer.weight, out=residual, **layer.fused) is residual
    assert torch.equal(bits(residual), bits(apart))


@EXAMPLES
@given(data=st.data(), seed=SEEDS, tokens=st.integers(1, MAX_ROWS), padding=st.sampled_from([3, 16]), fused=FUSED)
def test_only_the_output_is_written(data, seed, tokens, padding, fused, device, dtypes):
    """Output rows inside longer rows: what lies between them keeps its bits."""
    dtype = data.draw(st.sampled_from(dtypes))
    layer = Layer.draw(Draw(seed, device), tokens, 48, 33, padding, dtype, fused)
    wide = torch.full((tokens + 2, 33 + padding), 7.0, dtype=dtype, device=device)
    skinny_linear(layer.x, layer.weight, out=wide[1:-1, :33], **layer.fused)
    torch.testing.assert_close(wide[1:-1, :33], layer.expected(), **tolerance("skinny_linear", dtype))
    wide[1:-1, :33] = 7.0
    assert wide.eq(7.0).all()


@pytest.mark.parametrize("tokens", [2, 9])
def test_a_nan_stays_in_its_row(tokens, device):
    layer = Layer.draw(
        Draw(0, device), tokens, 300, 33, 0, torch.float16, dict.fromkeys(("bias", "norm", "residual", "gated"), True)
    )
    layer.x[1, 17] = float("nan")
    bad = layer.run().isnan()
    assert bad[1].all()
    assert bad.sum() == 33


def test_pdl_is_for_cuda_devices_alone():
    assert not supports_pdl(torch.device("cpu"))
    assert not supports_pdl(torch.device("meta"))
    if interpreting():
        assert not supports_pdl(torch.device("cuda"))


@pytest.mark.skipif(interpreting() or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_dependent_launches_give_the_same_bits(tokens, device):
    """A chain in which every layer reads what the one before wrote, with and without PDL, eagerly and in a graph."""
    if not supports_pdl(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this GPU has no programmatic dependent launch")
    draw, layers, hidden = Draw(0, device), 24, 1024
    weights = [draw.normal(2 * hidden, hidden, dtype=torch.bfloat16, scale=hidden**-0.5) for _ in range(layers)]
    downs = [draw.normal(hidden, hidden, dtype=torch.bfloat16, scale=hidden**-0.5) for _ in range(layers)]
    norm = draw.normal(hidden, dtype=torch.bfloat16)
    start = draw.normal(tokens, hidden, dtype=torch.bfloat16)

    def chain(stream: torch.Tensor, wide: torch.Tensor, pdl: bool) -> None:
        for weight, down in zip(weights, downs, strict=True):
            plan_skinny_linear(stream, weight, wide, norm_weight=norm, eps=EPS, gated=True, pdl=pdl).run()
            plan_skinny_linear(wide, down, stream, residual=stream, pdl=pdl).run()

    expected, wide = start.clone(), torch.empty_like(start)
    chain(expected, wide, pdl=False)
    eager = start.clone()
    torch.cuda.synchronize()
    chain(eager, wide, pdl=True)
    assert torch.equal(bits(eager), bits(expected))

    stream, graph = start.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(start, 1, out=stream)
        chain(stream, wide, pdl=True)
    for _ in range(20):
        graph.replay()
        assert torch.equal(bits(stream), bits(expected))


def test_plans_of_a_bucket_are_one_kernel():
    """From 2 to 8 tokens, and from 9 to 16, nothing that is compiled in changes."""
    weight = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")

    def compiled(tokens: int) -> tuple:
        x, out = (torch.empty(tokens, n, dtype=torch.bfloat16, device="meta") for n in (1024, 4096))
        plan = plan_skinny_linear(x, weight, out)
        return plan.kernel, plan.grid, plan.constexprs, plan.options

    assert all(compiled(tokens) == compiled(2) for tokens in range(3, 9))
    assert all(compiled(tokens) == compiled(9) for tokens in range(10, 17))


@pytest.mark.parametrize("shared_memory", [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_shape_has_a_form_that_fits(itemsize, shared_memory):
    for tokens in (1, 2, 8, 9, 16):
        for columns in (1, 16, 576, 1024, 3072, 4096, 5120, 8192, 28672, 100_000):
            for rows in (2, 1024, 6144, 16384, 151936):
                for gated in (False, True):
                    form = choose_form(UNTUNED, tokens, columns, rows, itemsize, gated, True, shared_memory)
                    assert form.fits(token_block(tokens, shared_memory), gated, itemsize, shared_memory)
                    assert form.kind != "direct" or (itemsize == 2 and form.split > 1 and form.block_k >= 32)


@pytest.mark.parametrize("normed", [False, True])
def test_direct_forms_leave_less_than_a_step_over(normed):
    """No step is all padding, nor is there a stage without one."""
    for tokens, shared_memory in ((2, 227 * 1024), (16, 99 * 1024), (8, 64 * 1024)):
        for columns in (1, 300, 576, 896, 1024, 1152, 1536, 2048, 3000, 3072, 4096, 4864, 8192, 12288):
            form = choose_form(UNTUNED, tokens, columns, 4096, 2, False, normed, shared_memory)
            step = form.split * form.block_k
            if form.kind == "direct":
                assert form.num_stages <= -(-columns // step)
                assert step < 2 * columns or step == 256


def test_rows_without_left_over_columns_take_whole_steps():
    for columns in (1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192):
        for tokens in (8, 16):
            form = choose_form(UNTUNED, tokens, columns, 1024, 2, False, False, 227 * 1024)
            assert form.kind == "direct"
            assert columns % (form.split * form.block_k) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(17, 8)}, r"x must be \[M, K\], 1 <= M <= 16"),
        ({"x": torch.zeros(0, 8)}, r"x must be \[M, K\], 1 <= M <= 16"),
        ({"x": torch.zeros(8, 3).T}, "unit stride on K"),
        ({"weight": torch.zeros(4, 9)}, r"weight must be contiguous \[N, 8\]"),
        ({"weight": torch.zeros(4, 8, dtype=torch.float16)}, "weight must be contiguous"),
        ({"weight": torch.zeros(5, 8), "gated": True}, "stacks gate and up"),
        ({"bias": torch.zeros(3)}, r"bias must be contiguous \[4\]"),
        ({"norm_weight": torch.zeros(4)}, r"norm_weight must be contiguous \[8\]"),
        ({"residual": torch.zeros(2, 4)}, r"residual must be \[3, 4\]"),
        ({"out": torch.zeros(4, 3).T}, r"out must be \[3, 4\]"),
    ],
)
def test_refuses_what_does_not_fit(change, message, device):
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(4, 8)} | change
    moved = {key: value.to(device) if torch.is_tensor(value) else value for key, value in arguments.items()}
    with pytest.raises(KernelError, match=f"skinny_linear: .*{message}"):
        skinny_linear(moved.pop("x"), moved.pop("weight"), **moved)
