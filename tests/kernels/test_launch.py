"""How Inductor's source becomes steps of a program."""

from __future__ import annotations

import pytest

from ort_trainer.kernels.loops.launch import Launch, read_launch

KERNEL = '''
add_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'const int64_t'], r"""
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{
    out_ptr0[0] = in_ptr0[0] + ks0;
}
""")
'''


def read(*lines: str, kernel: str = KERNEL) -> Launch:
    body = ["arg0_1, arg1_1 = args", "args.clear()", *lines]
    return read_launch(f"{kernel}\ndef call(args):\n" + "\n".join(f"    {line}" for line in body))


def test_sizes_memory_loops_and_products_are_steps() -> None:
    launch = read(
        "arg0_1_size = arg0_1.size()",
        "s77 = arg0_1_size[1]",
        "s21 = s77",
        "s35 = arg1_1.size()[0] // 2",
        "assert_size_stride(arg0_1, (4, s77), (s77, 1), 'input')",
        "buf0 = empty_strided_cpu((2 * s35, 8), (8, 1), torch.float32)",
        "add_0(arg0_1, buf0, 2*s21)",
        "buf1 = buf0; del buf0  # reuse",
        "buf2 = torch.ops.aten.topk.default(buf1, 2, -1, True, True)",
        "buf3 = buf2[0]",
        "aten.index_put_(buf3, [arg1_1], buf1, True)",
        "buf4 = torch.ops.aten.mean.dim(buf1, [math.trunc(1.5 * torch.sym_float(s77))])",
        "extern_kernels.addmm(arg1_1, reinterpret_tensor(buf1, (8, 4), (1, 8), 3), buf3, alpha=-inf, beta=1, out=buf3)",
        "return (buf3, )",
    )
    half, twice = {"dim": "2 * (dim('x1_0') // 2)"}, {"dim": "2 * dim('x0_1')"}
    assert launch.symbols == {"x0_1": (0, 1), "x1_0": (1, 0)}
    assert launch.steps == [
        ("loops.empty", [[half, 8], [8, 1], {"torch": "float32"}], {}),
        ("loops.add_0", [{"x": 0}, {"v": 0}, twice], {}),
        ("aten.topk.default", [{"v": 0}, 2, -1, True, True], {}),
        ("getitem", [{"v": 2}, 0], {}),
        ("aten.index_put_.default", [{"v": 3}, [{"x": 1}], {"v": 0}, True], {}),
        ("aten.mean.dim", [{"v": 0}, [{"dim": "math.trunc(1.5 * dim('x0_1'))"}]], {}),
        ("loops.view", [{"v": 0}, [8, 4], [1, 8], 3], {}),
        ("aten.addmm.out", [{"x": 1}, {"v": 6}, {"v": 3}], {"alpha": -float("inf"), "beta": 1, "out": {"v": 3}}),
    ]
    assert (launch.results, launch.functions) == ([3], {"add_0": 3})
    assert "static void add_0_loops(const float* in_ptr0" in launch.source and "cpp_prefix.h" in launch.source
    assert 'extern "C" const char* add_0(const float* value0, float* value1, const int64_t value2)' in launch.source


def test_results_do_not_share_memory() -> None:
    launch = read(
        "buf0 = empty_strided_cpu((4,), (1,), torch.float32)",
        "return (buf0, reinterpret_tensor(buf0, (2, 2), (2, 1), 0), arg0_1, )",
    )
    assert [step[0] for step in launch.steps] == [
        "loops.empty",
        "loops.view",
        "aten.clone.default",
        "aten.clone.default",
    ]
    assert launch.results == [0, 2, 3] and launch.steps[3][1] == [{"x": 0}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import os", "'import os' is no call of a kernel"),
        ("buf0 = open('file')", r"\"open\('file'\)\" is no call of a kernel"),
        ("add_0(arg0_1, buf7, 3)", "'buf7' is no argument of a kernel"),
        ("add_0(arg0_1, arg1_1, s9 * 2)", r"'s9 \* 2' is no argument of a kernel"),
        ("buf0 = arg0_1.view", "'arg0_1.view' is no argument of a kernel"),
    ],
)
def test_other_statements_are_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(line, "return (arg0_1, )")


def test_kernels_with_other_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="a kernel takes .*'const double'"):
        read("return (arg0_1, )", kernel=KERNEL.replace("const int64_t'", "const double'"))
