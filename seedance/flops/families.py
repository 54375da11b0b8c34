"""The closed list of op families, and the family of every operator of the framework by its name.

Two executions of one model use other operators (`addmm` or `linear`, a fused kernel or its parts); a family is what stays
the same. Names come without overload and with their namespace (`aten.addmm`). Four families carry FLOPs; the rest move
bytes. What is in no list is `uncounted`, so that an unknown operator is seen and never passes for free. No framework is
imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from seedance.errors import SeedanceError


class FamilyError(SeedanceError):
    """An operator is given a family that does not exist: name, found."""


FAMILIES = (
    "matmul",
    "attention",
    "convolution",
    "rnn",
    "embedding",
    "norm",
    "softmax",
    "activation",
    "loss",
    "dropout",
    "elementwise",
    "reduction",
    "copy",
    "random",
    "sort",
    "optimizer",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "barrier",
    "uncounted",
)
"""Every family that a row may carry."""

FLOP_FAMILIES = frozenset({"matmul", "attention", "convolution", "rnn"})
"""Families whose operators run multiply-adds on matrix units: model FLOPs are theirs alone."""

COMM_FAMILIES = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv", "barrier"}
)
"""Families of communication between ranks."""

NO_ROW = "none"

_ATEN: Mapping[str, str] = MappingProxyType(
    {
        "matmul": """
            mm addmm bmm baddbmm mv addmv dot vdot addbmm addr linear matmul inner tensordot einsum chain_matmul
            linalg_multi_dot linalg_matmul linalg_vecdot linear_backward matmul_backward bilinear _trilinear _scaled_mm
            _scaled_mm_v2 _int_mm _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 _addmm_activation
            _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu
            _weight_int4pack_mm_with_scales_and_zeros _dyn_quant_matmul_4bit _mixed_dtypes_linear
            _wrapped_quantized_linear_prepacked fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation
            fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation mkldnn_linear mkldnn_linear_backward
            mkldnn_linear_backward_input mkldnn_linear_backward_weights _sparse_mm _sparse_addmm _sparse_sparse_matmul
            _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward sparse_sampled_addmm smm hspmm sspaddmm
            _cslt_sparse_mm _sparse_semi_structured_mm _sparse_semi_structured_addmm _sparse_semi_structured_linear
            cdist _cdist_forward _euclidean_dist _foreach_mm
        """,
        "attention": """
            scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
            _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
            _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
            _scaled_dot_product_fused_attention_overrideable _flash_attention_forward
            _flash_attention_forward_no_dropout_inplace _flash_attention_backward _efficient_attention_forward
            _efficient_attention_backward _cudnn_attention_forward _cudnn_attention_backward
            _native_multi_head_attention _triton_multi_head_attention _triton_scaled_dot_attention
            _transformer_encoder_layer_fwd
        """,
        "convolution": """
            convolution _convolution _convolution_mode convolution_overrideable convolution_backward
            convolution_backward_overrideable _convolution_double_backward conv_tbc_backward conv1d conv2d conv3d
            conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution cudnn_convolution_transpose
            cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution miopen_convolution_transpose
            miopen_depthwise_convolution miopen_convolution_relu miopen_convolution_add_relu mkldnn_convolution
            _mps_convolution _mps_convolution_transpose mps_convolution_backward mps_convolution_transpose_backward
            _slow_conv2d_forward _slow_conv2d_backward thnn_conv2d slow_conv3d slow_conv3d_forward slow_conv_dilated2d
            slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d _conv_depthwise2d conv_depthwise3d
            _nnpack_spatial_convolution
        """,
        "rnn": """
            lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell mkldnn_rnn_layer _cudnn_rnn
            miopen_rnn _lstm_mps lstm_mps_backward _thnn_fused_lstm_cell _thnn_fused_gru_cell
            _thnn_fused_lstm_cell_backward_impl _thnn_differentiable_lstm_cell_backward
            _thnn_differentiable_gru_cell_backward quantized_lstm quantized_gru quantized_lstm_cell quantized_gru_cell
            quantized_rnn_relu_cell quantized_rnn_tanh_cell
        """,
        "embedding": """
            embedding embedding_dense_backward embedding_sparse_backward embedding_renorm embedding_bag _embedding_bag
            _embedding_bag_forward_only _embedding_bag_dense_backward _embedding_bag_sparse_backward
            _embedding_bag_per_sample_weights_backward
        """,
        "norm": """
            layer_norm native_layer_norm group_norm native_group_norm batch_norm native_batch_norm instance_norm
            rms_norm _fused_rms_norm cudnn_batch_norm miopen_batch_norm quantized_batch_norm _native_batch_norm_legit
            _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_impl_index
            _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional batch_norm_stats
            batch_norm_elemt batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats
            batch_norm_backward_reduce batch_norm_backward_elemt _weight_norm _weight_norm_interface
            _weight_norm_differentiable_backward norm_except_dim renorm
        """,
        "softmax": """
            softmax log_softmax _softmax _log_softmax _safe_softmax _masked_softmax special_softmax special_log_softmax
            _sparse_softmax _sparse_log_softmax _nested_tensor_softmax_with_shape
        """,
        "activation": """
            relu relu6 gelu silu sigmoid tanh leaky_relu elu selu celu hardtanh hardswish hardsigmoid hardshrink
            softshrink softplus mish glu glu_jvp glu_backward_jvp prelu _prelu_kernel rrelu rrelu_with_noise
            rrelu_with_noise_functional log_sigmoid log_sigmoid_forward threshold
            infinitely_differentiable_gelu_backward special_expit
        """,
        "loss": """
            nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward nll_loss_nd mse_loss l1_loss smooth_l1_loss
            huber_loss binary_cross_entropy binary_cross_entropy_with_logits cross_entropy_loss kl_div ctc_loss
            _ctc_loss _cudnn_ctc_loss miopen_ctc_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss
            multilabel_margin_loss_forward hinge_embedding_loss cosine_embedding_loss triplet_margin_loss
            soft_margin_loss poisson_nll_loss
        """,
        "dropout": """
            dropout native_dropout _fused_dropout alpha_dropout feature_dropout feature_alpha_dropout _masked_scale
            _fill_mem_eff_dropout_mask
        """,
        "elementwise": """
            _conj_physical bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clip isinf isnan
            remainder rsub xlogy __and__ __iand__ __or__ __ior__ __xor__ __ixor__ __lshift__ __ilshift__ __rshift__
            __irshift__ fill zero _add_relu add sub mul div pow exp log clamp lerp addcmul addcdiv polar complex
            cosine_similarity cross linalg_cross outer ger kron masked_fill tril triu upsample_nearest1d
            upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
            _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
            _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa grid_sampler grid_sampler_2d
            grid_sampler_3d _grid_sampler_2d_cpu_fallback cudnn_grid_sampler affine_grid_generator
            cudnn_affine_grid_generator fake_quantize_per_channel_affine fake_quantize_per_tensor_affine
            fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
            _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fake_quantize_learnable_per_channel_affine
            _fake_quantize_learnable_per_tensor_affine _fused_moving_avg_obs_fq_helper
            _fused_moving_avg_obs_fq_helper_functional fused_moving_avg_obs_fake_quant quantize_per_tensor
            quantize_per_channel quantize_per_tensor_dynamic dequantize int_repr isclose isin isreal fix absolute
            negative heaviside gcd lcm chalf _compute_linear_combination floor_divide true_divide divide multiply
            subtract greater greater_equal less less_equal not_equal eq ne ge gt le lt copysign arctan2 arccos arccosh
            arcsin arcsinh arctan arctanh special_digamma special_erf special_erfc special_erfinv special_exp2
            special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_log1p special_logit
            special_multigammaln special_ndtr special_polygamma special_psi special_round special_sinc special_xlogy
            linalg_vander vander _saturate_weight_to_fp16 abs acos asin atan ceil cos cosh erf erfc expm1 floor frac
            lgamma log10 log1p log2 maximum minimum neg reciprocal round rsqrt sign sin sinh sqrt tan trunc clamp_max
            clamp_min
        """,
        "reduction": """
            sum mean prod amax amin max min aminmax _aminmax argmax argmin all any norm native_norm frobenius_norm
            nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm linalg__powsum _foreach_norm powsum std
            std_mean var var_mean logsumexp special_logsumexp nansum nanmean count_nonzero cumsum cumprod cummax cummin
            _cummax_helper _cummin_helper cummaxmin logcumsumexp _logcumsumexp cumulative_trapezoid trapezoid trapz
            trace diff gradient dist pairwise_distance pdist _pdist_forward _pdist_backward _cdist_backward histc
            bincount histogram histogramdd _histogramdd_bin_edges _histogramdd_from_bin_cts
            _histogramdd_from_bin_tensors segment_reduce _segment_reduce_backward _is_all_true _is_any_true allclose
            sum_to_size hash_tensor avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
            max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_avg_pool1d
            adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d
            adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d mkldnn_max_pool2d
            mkldnn_max_pool3d mkldnn_adaptive_avg_pool2d quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d
            _sparse_sum _sparse_csr_sum _sparse_csr_prod _nested_sum _choose_qparams_per_tensor
            choose_qparams_optimized cov corrcoef
        """,
        "copy": """
            copy clone contiguous _to_copy _to_cpu to_dense _to_dense to_mkldnn _copy_from _copy_from_and_resize
            copy_sparse_to_sparse _lazy_clone _pin_memory cat concat concatenate _chunk_cat stack _stack hstack vstack
            dstack row_stack column_stack block_diag cartesian_prod combinations repeat repeat_interleave tile
            broadcast_tensors meshgrid roll flip fliplr flipud rot90 pad constant_pad_nd _pad_circular _pad_enum
            reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
            pad_sequence gather index index_select index_put _index_put_impl _unsafe_index _unsafe_index_put
            _unsafe_masked_index _unsafe_masked_index_put_accumulate index_add index_copy index_fill index_reduce put
            take take_along_dim scatter scatter_add scatter_reduce masked_select masked_scatter where nonzero
            nonzero_static nonzero_numpy argwhere one_hot fft_fftshift fft_ifftshift im2col col2im unfold slice select
            diagonal as_strided_scatter slice_scatter select_scatter diagonal_scatter diag diag_embed diagflat
            fill_diagonal pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle max_unpool2d
            max_unpool3d value_selecting_reduction _gather_sparse unsafe_chunk unsafe_split unsafe_split_with_sizes
            type_as _mkldnn_reshape _mkldnn_transpose mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight
            _cudnn_rnn_flatten_weight _transform_bias_rescale_qkv _pack_padded_sequence _pad_packed_sequence
            _nested_from_padded _nested_from_padded_and_nested_example _nested_from_padded_tensor
            _nested_tensor_from_mask _nested_tensor_from_tensor_list _nested_select nested_to_padded_tensor
            to_padded_tensor _jagged_to_padded_dense_forward _padded_dense_to_jagged_forward _nested_get_values
            flatten_dense_tensors unflatten_dense_tensors _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half
            _cast_Int _cast_Long _cast_Short to_sparse _to_sparse to_sparse_csr to_sparse_csc to_sparse_bsr
            to_sparse_bsc _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc _to_sparse_semi_structured
            _sparse_semi_structured_tile _sparse_semi_structured_apply _sparse_semi_structured_apply_dense
            _cslt_compress sparse_mask _sparse_mask_projection _coalesce coalesce _convert_indices_from_coo_to_csr
            _convert_indices_from_csr_to_coo _spdiags _convert_weight_to_int4pack _convert_weight_to_int4pack_for_cpu
            _dyn_quant_pack_4bit_weight _wrapped_linear_prepack fbgemm_linear_quantize_weight
            fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix _make_per_tensor_quantized_tensor
            _make_per_channel_quantized_tensor _rowwise_prune get_gradients lift
        """,
        "random": """
            rand rand_like randn randn_like randint randint_like randperm random normal normal_functional log_normal
            uniform bernoulli binomial poisson multinomial exponential geometric cauchy _standard_gamma
            _standard_gamma_grad _sample_dirichlet _dirichlet_grad _philox_normal _philox_uniform _philox_key_fold_in
            _philox_key_split _sobol_engine_draw _sobol_engine_ff _sobol_engine_initialize_state _sobol_engine_scramble
        """,
        "sort": """
            sort argsort msort topk kthvalue median nanmedian mode quantile nanquantile _unique _unique2 unique_dim
            unique_consecutive unique_dim_consecutive searchsorted bucketize
        """,
        "optimizer": """
            _fused_adam _fused_adamw _fused_sgd _fused_adagrad _amp_foreach_non_finite_check_and_unscale
            _amp_update_scale
        """,
        "none": """
            empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided new_full new_ones
            new_zeros zeros zeros_like ones ones_like full full_like scalar_tensor arange range linspace logspace eye
            tril_indices triu_indices bartlett_window blackman_window hamming_window hann_window kaiser_window
            fft_fftfreq fft_rfftfreq from_file _efficientzerotensor _dim_arange _new_zeros_with_same_feature_meta
            _empty_affine_quantized _empty_per_channel_affine_quantized _cudnn_init_dropout_state sparse_coo_tensor
            sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor sparse_compressed_tensor
            _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors
            _sparse_compressed_tensor_unsafe _sparse_csr_tensor_unsafe _sparse_csc_tensor_unsafe
            _sparse_bsr_tensor_unsafe _sparse_bsc_tensor_unsafe _sparse_compressed_tensor_with_dims
            _validate_compressed_sparse_indices _validate_sparse_coo_tensor_args _validate_sparse_csr_tensor_args
            _validate_sparse_csc_tensor_args _validate_sparse_bsr_tensor_args _validate_sparse_bsc_tensor_args
            _validate_sparse_compressed_tensor_args squeeze unsqueeze t transpose swapaxes swapdims as_strided detach
            alias _unsafe_view set resize resize_as resize_as_sparse sparse_resize sparse_resize_and_clear
            _resize_output set_data data _coalesced requires_grad retain_grad retains_grad record_stream atleast_1d
            atleast_2d atleast_3d _add_batch_dim _remove_batch_dim _reshape_from_tensor _shape_as_tensor
            _has_same_storage_numel _has_compatible_shallow_copy_type _propagate_xla_data _make_dep_token _print
            _version _backward size stride numel dim storage_offset sym_size sym_stride sym_numel sym_storage_offset
            sym_is_contiguous sym_constrain_range sym_constrain_range_for_size _functional_sym_constrain_range
            _functional_sym_constrain_range_for_size _assert_async _assert_scalar _assert_tensor_metadata
            _functional_assert_async _functional_assert_scalar _linalg_check_errors _debug_has_internal_overlap
            is_coalesced is_complex is_conj is_contiguous is_distributed is_floating_point is_inference is_leaf is_neg
            is_nonzero is_pinned is_same_size is_set_to is_signed is_vulkan_available _is_zerotensor can_cast
            result_type promote_types get_device item _local_scalar_dense _nnz sparse_dim dense_dim _dimI _dimV
            output_nr q_scale q_zero_point q_per_channel_axis q_per_channel_scales q_per_channel_zero_points qscheme
            _fused_sdp_choice _use_cudnn_ctc_loss _use_miopen_ctc_loss _use_cudnn_rnn_flatten_weight
            cudnn_is_acceptable _nnpack_available _cufft_clear_plan_cache _cufft_get_plan_cache_max_size
            _cufft_get_plan_cache_size _cufft_set_plan_cache_max_size _cslt_sparse_mm_search
            _nested_compute_contiguous_strides_offsets _nested_get_jagged_dummy _nested_get_lengths
            _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets _nested_get_ragged_idx
            _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides
            _nested_tensor_from_mask_left_aligned
        """,
    }
)
"""Operators of `aten` and `prims` by family: without a trailing `_`, and for the most part without their backward."""

_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "matmul": """
            mkldnn._linear_pointwise mkl._mkl_linear quantized.linear quantized.linear_relu quantized.linear_leaky_relu
            quantized.linear_tanh quantized.linear_dynamic quantized.linear_relu_dynamic quantized.linear_dynamic_fp16
            quantized.linear_relu_dynamic_fp16 quantized.linear_dynamic_fp16_unpacked_weight
            quantized.linear_with_input_q_dq_qweight_dq_output_fp32
            quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32 quantized.int4mm_packed_weight_cpu
            quantized.matmul _quantized.linear _quantized.linear_dynamic _quantized.wrapped_fbgemm_linear_fp16_weight
            _quantized.wrapped_quantized_linear _quantized._wrapped_quantized_linear_prepacked onednn.qlinear_pointwise
            onednn.linear_dynamic_fp16 onednn.linear_relu_dynamic_fp16 sparse.qlinear sparse.qlinear_relu
            sparse.qlinear_dynamic sparse.qlinear_relu_dynamic inductor._mm_plus_mm symm_mem._async_input_mm
            symm_mem.fused_all_gather_matmul symm_mem.fused_all_gather_scaled_matmul
            symm_mem.fused_matmul_reduce_scatter symm_mem.fused_scaled_matmul_reduce_scatter
            _native._foreach_mm_native_0 transformers.grouped_mm_fallback torch_nn._linear_cross_entropy_batch_chunked
            torch_nn._linear_cross_entropy_batch_chunked_no_reduction bitsandbytes.int8_linear_matmul
            bitsandbytes.int8_scaled_mm bitsandbytes.int8_mixed_scaled_mm bitsandbytes.gemv_4bit
        """,
        "convolution": """
            mkldnn._convolution_pointwise mkldnn._convolution_transpose_pointwise mkldnn_prepacked.conv2d_run
            quantized.conv1d quantized.conv1d_relu quantized.conv1d_dynamic quantized.conv2d quantized.conv2d_relu
            quantized.conv2d_add quantized.conv2d_add_relu quantized.conv2d_dynamic quantized.conv3d
            quantized.conv3d_relu quantized.conv3d_dynamic quantized.conv_transpose1d
            quantized.conv_transpose1d_dynamic quantized.conv_transpose2d quantized.conv_transpose2d_dynamic
            quantized.conv_transpose3d quantized.conv_transpose3d_dynamic _quantized.conv2d _quantized.conv2d_relu
            _quantized.conv3d _quantized.conv3d_relu _quantized.conv_transpose1d _quantized.conv_transpose2d
            onednn.qconv_pointwise onednn.qconv1d_pointwise onednn.qconv2d_pointwise onednn.qconv3d_pointwise
            torchvision.deform_conv2d torchvision._deform_conv2d
        """,
        "attention": """
            higher_order.flex_attention higher_order.flex_attention_backward flash_attn._flash_attn_forward
            flash_attn._flash_attn_backward flash_attn._flash_attn_varlen_forward
            flash_attn._flash_attn_varlen_backward torch_attn._varlen_attn torch_attn._varlen_attn_out
            torch_attn._varlen_attn_backward
        """,
        "rnn": """
            quantized.quantized_gru_cell_dynamic quantized.quantized_lstm_cell_dynamic
            quantized.quantized_rnn_relu_cell_dynamic quantized.quantized_rnn_tanh_cell_dynamic
        """,
        "embedding": """
            quantized.embedding_4bit quantized.embedding_byte quantized.embedding_bag_byte quantized.embedding_bag_4bit
            quantized.embedding_bag_byte_rowwise_offsets quantized.embedding_bag_4bit_rowwise_offsets
            quantized.embedding_bag_2bit_rowwise_offsets static_runtime.embedding_bag
        """,
        "norm": """
            quantized.batch_norm quantized.batch_norm_relu quantized.batch_norm1d quantized.batch_norm1d_relu
            quantized.batch_norm2d quantized.batch_norm2d_relu quantized.batch_norm3d quantized.batch_norm3d_relu
            quantized.group_norm quantized.instance_norm quantized.layer_norm onednn.qbatch_norm2d
            static_runtime.layer_norm
        """,
        "softmax": "quantized.softmax",
        "activation": """
            quantized.celu quantized.elu quantized.hardswish quantized.leaky_relu quantized.prelu quantized.relu6
            quantized.sigmoid quantized.threshold prims.tanh
        """,
        "dropout": "quantized.dropout",
        "elementwise": """
            quantized.add quantized.add_relu quantized.add_scalar quantized.add_scalar_relu quantized.mul
            quantized.mul_relu quantized.mul_scalar quantized.mul_scalar_relu quantized.clamp _quantized.add
            onednn.qadd onednn.qadd_relu onednn.qmul quantization._FloatToBfloat16Quantized
            quantization._Bfloat16QuantizedToFloat inductor.accumulate_grad static_runtime.signed_log1p
            static_runtime.clamp_nan_to_num symm_mem.memset32 prims.acosh prims.asinh prims.atan2 prims.atanh
            prims.bessel_i0 prims.bessel_i0e prims.bessel_i1 prims.bessel_i1e prims.bessel_j0 prims.bessel_j1
            prims.bitwise_and prims.bitwise_or prims.bitwise_xor prims.cbrt prims.erf_inv prims.erfcx prims.fmod
            prims.frexp prims.isfinite prims.ndtri prims.remainder prims.shift_left prims.shift_right_arithmetic
            prims.spherical_bessel_j0 prims.zeta bitsandbytes.int8_mm_dequant bitsandbytes.int8_vectorwise_quant
            bitsandbytes.int8_vectorwise_dequant bitsandbytes.int8_double_quant bitsandbytes.quantize_blockwise
            bitsandbytes.dequantize_blockwise bitsandbytes.quantize_4bit bitsandbytes.dequantize_4bit
        """,
        "reduction": "quantized.max_pool1d quantized.max_pool2d prims.xor_sum",
        "copy": """
            fsdp.all_gather_copy_in fsdp.chunk_cat fsdp.copy_ fsdp.split_with_sizes_copy quantized.cat
            quantized.cat_relu prims.convert_element_type prims.device_put prims.clone prims.copy_to prims.copy_strided
            prims.reshape prims.rev prims.where torchvision.roi_align torchvision.roi_pool torchvision.ps_roi_align
            torchvision.ps_roi_pool static_runtime.fused_equally_split flex_lib.zeros_and_scatter
            mkldnn._reorder_linear_weight mkldnn._reorder_convolution_weight
            mkldnn._reorder_convolution_transpose_weight mkldnn._reorder_mkldnn_rnn_layer_weight
            mkl._mkl_reorder_linear_weight _quantized.wrapped_fbgemm_pack_gemm_matrix_fp16
        """,
        "random": "rngprims.philox_rand prims.normal prims.uniform",
        "sort": "torchvision.nms",
        "all_gather": """
            c10d.allgather_ c10d._allgather_base_ c10d.allgather_coalesced_ c10d.allgather_into_tensor_coalesced_
            c10d.gather_ _c10d_functional.all_gather_into_tensor _c10d_functional.all_gather_into_tensor_coalesced
            _c10d_functional.all_gather_into_tensor_out _c10d_functional_autograd.all_gather_into_tensor
            symm_mem.multimem_all_gather_out symm_mem._low_contention_all_gather
        """,
        "reduce_scatter": """
            c10d.reduce_scatter_ c10d._reduce_scatter_base_ c10d.reduce_scatter_tensor_coalesced_
            _c10d_functional.reduce_scatter_tensor _c10d_functional.reduce_scatter_tensor_coalesced
            _c10d_functional.reduce_scatter_tensor_out _c10d_functional_autograd.reduce_scatter_tensor
            symm_mem.reduce_scatter_out symm_mem.nccl_reduce_scatter_offset symm_mem._low_contention_reduce_scatter
            symm_mem.tile_reduce symm_mem.multi_root_tile_reduce
        """,
        "all_reduce": """
            c10d.allreduce_ c10d.allreduce_coalesced_ c10d.reduce_ _c10d_functional.all_reduce
            _c10d_functional.all_reduce_ _c10d_functional.all_reduce_coalesced _c10d_functional.all_reduce_coalesced_
            symm_mem.multimem_all_reduce_ symm_mem.multimem_one_shot_all_reduce
            symm_mem.multimem_one_shot_all_reduce_out symm_mem.multimem_one_shot_reduce_out
            symm_mem.one_shot_all_reduce symm_mem.one_shot_all_reduce_copy symm_mem.one_shot_all_reduce_copy_out
            symm_mem.one_shot_all_reduce_out symm_mem.two_shot_all_reduce_ symm_mem.two_shot_all_reduce_out
        """,
        "all_to_all": """
            c10d.alltoall_ c10d.alltoall_base_ _c10d_functional.all_to_all_single
            _c10d_functional_autograd.all_to_all_single _dtensor.shard_dim_alltoall symm_mem.all_to_all_vdev
            symm_mem.all_to_all_vdev_2d symm_mem.all_to_all_vdev_2d_offset symm_mem.nvshmem_all_to_all
        """,
        "broadcast": """
            c10d.broadcast_ c10d.scatter_ _c10d_functional.broadcast _c10d_functional.broadcast_
            symm_mem.nvshmem_broadcast
        """,
        "send": """
            c10d.send _c10d_functional.isend _c10d_functional.batch_p2p_ops symm_mem.nccl_put symm_mem.nccl_put_signal
            symm_mem.nccl_put_with_signal symm_mem.nvshmem_put symm_mem.nvshmem_put_with_signal
        """,
        "recv": """
            c10d.recv_ c10d.recv_any_source_ _c10d_functional.irecv symm_mem.nccl_get symm_mem.nvshmem_get
        """,
        "barrier": "c10d.barrier c10d.monitored_barrier_ symm_mem._barrier",
        "none": """
            _c10d_functional.wait_tensor _c10d_functional._wrap_tensor_autograd c10d.check_for_nan
            inductor._alloc_from_pool inductor._reinterpret_tensor inductor.resize_storage_bytes prims.iota prims.item
            prims._make_token prims._sink_tokens symm_mem._rendezvous symm_mem.get_remote_tensors
            _dtensor.mesh_get_process_group symm_mem.nccl_wait_for_signal symm_mem.nccl_wait_signal
            symm_mem.nvshmem_wait_for_signal symm_mem.stream_write_value32 mkldnn._nbytes mkldnn.data_ptr
            mkldnn._get_mkldnn_serialized_md mkldnn._is_mkldnn_acl_supported mkldnn._is_mkldnn_bf16_supported
            mkldnn._is_mkldnn_fp16_supported inductor_prims.inductor_reserve_rng_state debug_mode_ops.annotate
            export.access_subclass_inner_tensor profiler._record_function_enter profiler._record_function_enter_new
            profiler._record_function_exit prims.collapse prims.maximum_value prims.minimum_value prim.device
            prim.layout debugprims.load_tensor static_runtime.VarTupleUnpack static_runtime.create_owned_ref
            static_runtime.dict_unpack quantized.conv2d_dilation quantized.conv2d_groups
            quantized.conv2d_output_padding quantized.conv2d_padding quantized.conv2d_stride quantized.conv2d_transpose
            quantized.conv2d_unpack_sizes quantized.conv3d_dilation quantized.conv3d_groups
            quantized.conv3d_output_padding quantized.conv3d_padding quantized.conv3d_stride quantized.conv3d_transpose
            quantized.conv_transpose2d_dilation quantized.conv_transpose2d_groups
            quantized.conv_transpose2d_output_padding quantized.conv_transpose2d_padding
            quantized.conv_transpose2d_stride quantized.conv_transpose2d_transpose quantized.conv_transpose3d_dilation
            quantized.conv_transpose3d_groups quantized.conv_transpose3d_output_padding
            quantized.conv_transpose3d_padding quantized.conv_transpose3d_stride quantized.conv_transpose3d_transpose
            quantized.make_quantized_cell_params quantized.make_quantized_cell_params_dynamic
            quantized.make_quantized_cell_params_fp16
        """,
    }
)
"""Operators of the other namespaces by family."""

_NAMESPACES: Mapping[str, str] = MappingProxyType(
    {"fsdp": "copy", "quantized_decomposed": "elementwise", "streams": NO_ROW, "profiler": NO_ROW}
)
"""Families of whole namespaces, where no list names the operator."""

_RENAMED: Mapping[str, str] = MappingProxyType({"c10d_functional": "_c10d_functional"})
"""Namespaces that have the operators of another under an older name."""

_PLAIN = ("aten", "prims")
_SETUP = (
    "_prepack",
    "_unpack",
    "_prepack_fp16",
    "_prepack_legacy",
    "_unpack_fp16",
    "_prepack_fp16_legacy",
    "_with_rowwise_min_max",
)
_PACKING = ("quantized", "_quantized", "onednn", "sparse", "mkldnn_prepacked")


@cache
def family(aten_name: str, *, pointwise: bool, view: bool) -> str | None:
    """Family of an operator, one of `FAMILIES`; None for views, factories and metadata, which get no row.

    Args:
        aten_name: name with namespace and without overload, `aten.addmm`.
        pointwise: the framework tags it as pointwise: `elementwise` unless a list here says more.
        view: its output aliases an input.

    An operator of no list is `uncounted`, and so is every one of an unknown namespace that is not pointwise.
    """
    found = _KNOWN.get(aten_name) or _by_stem(aten_name)
    if found is None:
        if view:
            return None
        return "elementwise" if pointwise else "uncounted"
    if found == NO_ROW or (view and found not in FLOP_FAMILIES):
        return None
    return found


def declare(name: str, kind: str) -> None:
    """Give an operator of somebody else's a family.

    Args:
        name: name with namespace and without overload.
        kind: one of `FAMILIES`.

    Raises:
        FamilyError: no such family.
    """
    if kind not in FAMILIES:
        raise FamilyError(
            f"family of {name}: expected one of {', '.join(FAMILIES)}; found {kind!r}", name=name, found=kind
        )
    _KNOWN[name] = kind
    family.cache_clear()


def _by_stem(name: str) -> str | None:
    """Family of an in-place, backward, multi-tensor or copying form, by the operator that it is a form of."""
    namespace, _, base = name.partition(".")
    if namespace in _RENAMED:
        return _KNOWN.get(f"{_RENAMED[namespace]}.{base}")
    stem = base.rstrip("_") if not base.endswith("__") else base
    for ending in ("_out", "_backward_data", "_backward"):
        stem = stem.removesuffix(ending)
    for candidate in (f"{namespace}.{stem}", f"aten.{stem}" if namespace == "prims" else ""):
        if candidate in _KNOWN and candidate != name:
            return _KNOWN[candidate]
    if namespace in _PLAIN and stem.startswith("_foreach_"):
        return _KNOWN.get(f"aten.{stem.removeprefix('_foreach_')}", "elementwise")
    copies = namespace in (*_PLAIN, "static_runtime") and stem.endswith("_copy")
    if copies or (namespace in _PACKING and base.endswith(_SETUP)):
        return "copy"
    return _NAMESPACES.get(namespace)


def _index() -> dict[str, str]:
    known: dict[str, str] = {}
    for kind, names in _ATEN.items():
        known.update((f"aten.{name}", kind) for name in names.split())
    for kind, names in _OTHERS.items():
        known.update((name, kind) for name in names.split())
    return known


_KNOWN = _index()
