"""FLOPs of the framework's convolutions and recurrent layers.

Both follow from one rule: every position meets every weight once. So groups, dilation, stride and padding need no
argument, and a gradient costs what the forward did.
"""

from __future__ import annotations

from typing import Any

from seedance.flops.registry import (
    ZERO,
    Call,
    Cost,
    elements,
    first_tensor,
    formula,
    is_tensor,
    rows,
    shape,
    wanted,
)


@formula("convolution _convolution convolution_overrideable", "input weight bias stride padding dilation transposed")
def _conv(call: Call) -> int:
    return _convolved(call["input"], call["weight"], first_tensor(call.out), bool(call["transposed"]))


@formula("_convolution_mode conv1d conv2d conv3d _nnpack_spatial_convolution", "input weight")
@formula(
    """
    cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution miopen_depthwise_convolution
    miopen_convolution_relu miopen_convolution_add_relu mkldnn_convolution _mps_convolution _slow_conv2d_forward
    thnn_conv2d slow_conv3d slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d _conv_depthwise2d
    conv_depthwise3d
    """,
    "self weight",
)
def _conv_plain(call: Call) -> int:
    return _convolved(call.args[0], call["weight"], first_tensor(call.out), False)


@formula("conv_transpose1d conv_transpose2d conv_transpose3d", "input weight")
@formula(
    """
    cudnn_convolution_transpose miopen_convolution_transpose _mps_convolution_transpose slow_conv_transpose2d
    slow_conv_transpose3d
    """,
    "self weight",
)
def _conv_transpose(call: Call) -> int:
    return _convolved(call.args[0], call["weight"], first_tensor(call.out), True)


def _convolved(source: Any, weight: Any, out: Any, transposed: bool) -> int:
    """FLOPs of a convolution: the positions are those of the output; of the input, when transposed.

    A weight is (out, in / groups, kernel); transposed, (in, out / groups, kernel).
    """
    channels = shape(weight)[0]
    return 2 * elements(weight) * (elements(source if transposed else out) // channels) if channels else 0


@formula("mkldnn._convolution_pointwise", "X")
def _conv_pointwise(call: Call) -> int:
    """Forms with a second operand have it before the weight; the padding, a list, tells them apart."""
    weight = call.args[1] if isinstance(call.args[3], list | tuple) else call.args[2]
    return _convolved(call["X"], weight, first_tensor(call.out), False)


@formula("mkldnn._convolution_transpose_pointwise", "X W")
def _conv_transpose_pointwise(call: Call) -> int:
    """A packed weight has its channels in another order: those of the input are the input's second size."""
    channels = shape(call["X"])[1]
    return 2 * elements(call["W"]) * (elements(call["X"]) // channels) if channels else 0


@formula(
    "onednn.qconv_pointwise onednn.qconv1d_pointwise onednn.qconv2d_pointwise onednn.qconv3d_pointwise",
    "qx x_scale x_zero_point qw",
)
def _quantised_conv(call: Call) -> int:
    return _convolved(call["qx"], call["qw"], first_tensor(call.out), False)


@formula(
    """
    quantized.conv1d quantized.conv1d_relu quantized.conv1d_dynamic quantized.conv2d quantized.conv2d_relu
    quantized.conv2d_add quantized.conv2d_add_relu quantized.conv2d_dynamic quantized.conv3d quantized.conv3d_relu
    quantized.conv3d_dynamic quantized.conv_transpose1d quantized.conv_transpose1d_dynamic quantized.conv_transpose2d
    quantized.conv_transpose2d_dynamic quantized.conv_transpose3d quantized.conv_transpose3d_dynamic _quantized.conv2d
    _quantized.conv2d_relu _quantized.conv3d _quantized.conv3d_relu _quantized.conv_transpose1d
    _quantized.conv_transpose2d
    """,
    "",
)
def _packed_conv(call: Call) -> int | None:
    """The weight is in an object of the framework's, which gives it when asked."""
    packed = next((arg for arg in call.args if hasattr(arg, "unpack")), None)
    if packed is None:
        return None
    transposed = bool(packed.transpose()) if hasattr(packed, "transpose") else False
    return _convolved(call.args[0], packed.unpack()[0], first_tensor(call.out), transposed)


@formula(
    "convolution_backward",
    "grad_output input weight bias_sizes stride padding dilation transposed output_padding groups output_mask",
)
@formula(
    "convolution_backward_overrideable",
    "grad_output input weight stride padding dilation transposed output_padding groups output_mask",
)
def _conv_backward(call: Call) -> int:
    """Each gradient pairs the positions and weights that the forward did, in groups too."""
    one = _convolved(call["input"], call["weight"], call["grad_output"], bool(call["transposed"]))
    return wanted(call["output_mask"], 0, 1) * one


@formula("_slow_conv2d_backward", "grad_output self weight kernel_size stride padding output_mask")
@formula("mps_convolution_backward", "self grad_output weight padding stride dilation groups output_mask")
def _conv_backward_plain(call: Call) -> int:
    one = _convolved(call["self"], call["weight"], call["grad_output"], False)
    mask = call["output_mask"]
    return wanted(mask if isinstance(mask, list | tuple) else None, 0, 1) * one


@formula(
    "mps_convolution_transpose_backward",
    "self grad_output weight padding output_padding stride dilation groups output_mask",
)
def _conv_transpose_backward(call: Call) -> int:
    return wanted(call["output_mask"], 0, 1) * _convolved(call["self"], call["weight"], call["grad_output"], True)


@formula("conv_tbc", "self weight")
def _conv_tbc(call: Call) -> int:
    return 2 * rows(first_tensor(call.out)) * elements(call["weight"])


@formula("conv_tbc_backward", "self input weight")
def _conv_tbc_backward(call: Call) -> int:
    return 2 * 2 * rows(call["self"]) * elements(call["weight"])


@formula("lstm gru rnn_tanh rnn_relu _lstm_mps", "")
def _recurrent(call: Call) -> int:
    """Sequences are one tensor, (input, states, weights, …), or packed, (data, sizes, states, weights, …)."""
    packed = is_tensor(call.args[1]) and not isinstance(call.args[2], list | tuple)
    packed = packed or isinstance(call.args[3], list | tuple)
    return 2 * rows(call.args[0]) * _matrices(call.args[3 if packed else 2])


@formula("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", "input hx w_ih w_hh")
def _cell(call: Call) -> int:
    return 2 * rows(call["input"]) * _matrices((call["w_ih"], call["w_hh"]))


@formula("mkldnn_rnn_layer", "input weight0 weight1")
def _mkldnn_rnn(call: Call) -> int:
    return 2 * rows(call["input"]) * _matrices((call["weight0"], call["weight1"]))


@formula("mkldnn_rnn_layer_backward", "input weight1 weight2")
def _mkldnn_rnn_backward(call: Call) -> int:
    return 2 * 2 * rows(call["input"]) * _matrices((call["weight1"], call["weight2"]))


@formula("_cudnn_rnn miopen_rnn", "input weight")
def _fused_rnn(call: Call) -> int:
    return 2 * rows(call["input"]) * _matrices(call["weight"])


_RNN_BACKWARD = "input weight weight_stride0 weight_buf hx cx output grad_output grad_hy grad_cy mode hidden_size"
_RNN_BACKWARD_END = "num_layers batch_first dropout train bidirectional batch_sizes dropout_state reserve output_mask"


@formula("_cudnn_rnn_backward", f"{_RNN_BACKWARD} proj_size {_RNN_BACKWARD_END}")
@formula("miopen_rnn_backward", f"{_RNN_BACKWARD} {_RNN_BACKWARD_END}")
def _fused_rnn_backward(call: Call) -> int:
    """Gradients of the data are always computed, those of the weights when wanted."""
    one = 2 * rows(call["input"]) * _matrices(call["weight"])
    return (1 + wanted(call["output_mask"], 3)) * one


@formula(
    """
    _thnn_fused_lstm_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_lstm_cell_backward
    _thnn_fused_gru_cell_backward _thnn_differentiable_lstm_cell_backward _thnn_differentiable_gru_cell_backward
    """,
    "",
)
def _gates(call: Call) -> Cost:
    """What a step does to its gates, element by element; their products were operators of their own."""
    return ZERO


def _matrices(weights: Any) -> int:
    """Elements of those weights that are matrices: the rest are biases."""
    return sum(elements(weight) for weight in weights if len(shape(weight)) == 2)
