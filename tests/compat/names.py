"""Where the incumbent defines its public classes and functions: ``module: name name …``."""

from __future__ import annotations

_TABLE = """
extensions.backprop_extension: BackpropExtension
extensions.curvature: Curvature
extensions.curvmatprod.ggnmp: GGNMP
extensions.curvmatprod.ggnmp.activations: GGNMPReLU GGNMPSigmoid GGNMPTanh
extensions.curvmatprod.ggnmp.batchnorm1d: GGNMPBatchNorm1d
extensions.curvmatprod.ggnmp.conv2d: GGNMPConv2d
extensions.curvmatprod.ggnmp.dropout: GGNMPDropout
extensions.curvmatprod.ggnmp.flatten: GGNMPFlatten
extensions.curvmatprod.ggnmp.ggnmpbase: GGNMPBase
extensions.curvmatprod.ggnmp.linear: GGNMPLinear
extensions.curvmatprod.ggnmp.losses: GGNMPLoss GGNMPMSELoss GGNMPCrossEntropyLoss
extensions.curvmatprod.ggnmp.padding: GGNMPZeroPad2d
extensions.curvmatprod.ggnmp.pooling: GGNMPAvgPool2d GGNMPMaxpool2d
extensions.curvmatprod.hmp: HMP
extensions.curvmatprod.hmp.activations: HMPReLU HMPSigmoid HMPTanh
extensions.curvmatprod.hmp.batchnorm1d: HMPBatchNorm1d
extensions.curvmatprod.hmp.conv2d: HMPConv2d
extensions.curvmatprod.hmp.dropout: HMPDropout
extensions.curvmatprod.hmp.flatten: HMPFlatten
extensions.curvmatprod.hmp.hmpbase: HMPBase
extensions.curvmatprod.hmp.linear: HMPLinear
extensions.curvmatprod.hmp.losses: HMPLoss HMPMSELoss HMPCrossEntropyLoss
extensions.curvmatprod.hmp.padding: HMPZeroPad2d
extensions.curvmatprod.hmp.pooling: HMPAvgPool2d HMPMaxpool2d
extensions.curvmatprod.pchmp: PCHMP
extensions.curvmatprod.pchmp.activations: PCHMPReLU PCHMPSigmoid PCHMPTanh
extensions.curvmatprod.pchmp.conv2d: PCHMPConv2d
extensions.curvmatprod.pchmp.dropout: PCHMPDropout
extensions.curvmatprod.pchmp.flatten: PCHMPFlatten
extensions.curvmatprod.pchmp.linear: PCHMPLinear
extensions.curvmatprod.pchmp.losses: PCHMPLoss PCHMPMSELoss PCHMPCrossEntropyLoss
extensions.curvmatprod.pchmp.padding: PCHMPZeroPad2d
extensions.curvmatprod.pchmp.pchmpbase: PCHMPBase
extensions.curvmatprod.pchmp.pooling: PCHMPAvgPool2d PCHMPMaxpool2d
extensions.firstorder.base: FirstOrderModuleExtension FirstOrderBackpropExtension
extensions.firstorder.batch_grad: BatchGrad
extensions.firstorder.batch_grad.batch_grad_base: BatchGradBase
extensions.firstorder.batch_grad.batchnorm_nd: BatchGradBatchNormNd
extensions.firstorder.batch_grad.conv1d: BatchGradConv1d
extensions.firstorder.batch_grad.conv2d: BatchGradConv2d
extensions.firstorder.batch_grad.conv3d: BatchGradConv3d
extensions.firstorder.batch_grad.conv_transpose1d: BatchGradConvTranspose1d
extensions.firstorder.batch_grad.conv_transpose2d: BatchGradConvTranspose2d
extensions.firstorder.batch_grad.conv_transpose3d: BatchGradConvTranspose3d
extensions.firstorder.batch_grad.embedding: BatchGradEmbedding
extensions.firstorder.batch_grad.linear: BatchGradLinear
extensions.firstorder.batch_grad.rnn: BatchGradRNN BatchGradLSTM
extensions.firstorder.batch_l2_grad: BatchL2Grad
extensions.firstorder.batch_l2_grad.batch_l2_base: BatchL2Base
extensions.firstorder.batch_l2_grad.batchnorm_nd: BatchL2BatchNorm
extensions.firstorder.batch_l2_grad.convnd: BatchL2ConvND BatchL2Conv1d BatchL2Conv2d
    BatchL2Conv3d
extensions.firstorder.batch_l2_grad.convtransposend: BatchL2ConvTransposeND BatchL2ConvTranspose1d
    BatchL2ConvTranspose2d BatchL2ConvTranspose3d
extensions.firstorder.batch_l2_grad.embedding: BatchL2Embedding
extensions.firstorder.batch_l2_grad.linear: BatchL2Linear
extensions.firstorder.batch_l2_grad.rnn: BatchL2RNN BatchL2LSTM
extensions.firstorder.gradient.base: GradBaseModule
extensions.firstorder.gradient.batchnorm_nd: GradBatchNormNd
extensions.firstorder.gradient.conv1d: GradConv1d
extensions.firstorder.gradient.conv2d: GradConv2d
extensions.firstorder.gradient.conv3d: GradConv3d
extensions.firstorder.gradient.convtranspose1d: GradConvTranspose1d
extensions.firstorder.gradient.convtranspose2d: GradConvTranspose2d
extensions.firstorder.gradient.convtranspose3d: GradConvTranspose3d
extensions.firstorder.gradient.embedding: GradEmbedding
extensions.firstorder.gradient.linear: GradLinear
extensions.firstorder.gradient.rnn: GradRNN GradLSTM
extensions.firstorder.sum_grad_squared: SumGradSquared
extensions.firstorder.sum_grad_squared.batchnorm_nd: SGSBatchNormNd
extensions.firstorder.sum_grad_squared.conv1d: SGSConv1d
extensions.firstorder.sum_grad_squared.conv2d: SGSConv2d
extensions.firstorder.sum_grad_squared.conv3d: SGSConv3d
extensions.firstorder.sum_grad_squared.convtranspose1d: SGSConvTranspose1d
extensions.firstorder.sum_grad_squared.convtranspose2d: SGSConvTranspose2d
extensions.firstorder.sum_grad_squared.convtranspose3d: SGSConvTranspose3d
extensions.firstorder.sum_grad_squared.embedding: SGSEmbedding
extensions.firstorder.sum_grad_squared.linear: SGSLinear
extensions.firstorder.sum_grad_squared.rnn: SGSRNN SGSLSTM
extensions.firstorder.sum_grad_squared.sgs_base: SGSBase
extensions.firstorder.variance: Variance
extensions.firstorder.variance.batchnorm_nd: VarianceBatchNormNd
extensions.firstorder.variance.conv1d: VarianceConv1d
extensions.firstorder.variance.conv2d: VarianceConv2d
extensions.firstorder.variance.conv3d: VarianceConv3d
extensions.firstorder.variance.convtranspose1d: VarianceConvTranspose1d
extensions.firstorder.variance.convtranspose2d: VarianceConvTranspose2d
extensions.firstorder.variance.convtranspose3d: VarianceConvTranspose3d
extensions.firstorder.variance.embedding: VarianceEmbedding
extensions.firstorder.variance.linear: VarianceLinear
extensions.firstorder.variance.rnn: VarianceRNN VarianceLSTM
extensions.firstorder.variance.variance_base: VarianceBaseModule
extensions.mat_to_mat_jac_base: MatToJacMat
extensions.module_extension: ModuleExtension
extensions.saved_quantities: SavedQuantities
extensions.secondorder.base: SecondOrderBackpropExtension
extensions.secondorder.diag_ggn: DiagGGN DiagGGNExact DiagGGNMC BatchDiagGGN BatchDiagGGNExact
    BatchDiagGGNMC
extensions.secondorder.diag_ggn.activations: DiagGGNReLU DiagGGNSigmoid DiagGGNTanh DiagGGNELU
    DiagGGNSELU DiagGGNLeakyReLU DiagGGNLogSigmoid
extensions.secondorder.diag_ggn.adaptive_avg_pool_nd: DiagGGNAdaptiveAvgPoolNd
extensions.secondorder.diag_ggn.batchnorm_nd: DiagGGNBatchNormNd BatchDiagGGNBatchNormNd
extensions.secondorder.diag_ggn.conv1d: DiagGGNConv1d BatchDiagGGNConv1d
extensions.secondorder.diag_ggn.conv2d: DiagGGNConv2d BatchDiagGGNConv2d
extensions.secondorder.diag_ggn.conv3d: DiagGGNConv3d BatchDiagGGNConv3d
extensions.secondorder.diag_ggn.convnd: DiagGGNConvND BatchDiagGGNConvND
extensions.secondorder.diag_ggn.convtranspose1d: DiagGGNConvTranspose1d
    BatchDiagGGNConvTranspose1d
extensions.secondorder.diag_ggn.convtranspose2d: DiagGGNConvTranspose2d
    BatchDiagGGNConvTranspose2d
extensions.secondorder.diag_ggn.convtranspose3d: DiagGGNConvTranspose3d
    BatchDiagGGNConvTranspose3d
extensions.secondorder.diag_ggn.convtransposend: DiagGGNConvTransposeND
    BatchDiagGGNConvTransposeND
extensions.secondorder.diag_ggn.custom_module: DiagGGNScaleModule DiagGGNSumModule
extensions.secondorder.diag_ggn.diag_ggn_base: DiagGGNBaseModule
extensions.secondorder.diag_ggn.dropout: DiagGGNDropout
extensions.secondorder.diag_ggn.embedding: DiagGGNEmbedding BatchDiagGGNEmbedding
extensions.secondorder.diag_ggn.flatten: DiagGGNFlatten
extensions.secondorder.diag_ggn.linear: DiagGGNLinear BatchDiagGGNLinear
extensions.secondorder.diag_ggn.losses: DiagGGNLoss DiagGGNMSELoss DiagGGNCrossEntropyLoss
    DiagGGNBCEWithLogitsLossDerivatives
extensions.secondorder.diag_ggn.pad: DiagGGNPad
extensions.secondorder.diag_ggn.padding: DiagGGNZeroPad2d
extensions.secondorder.diag_ggn.permute: DiagGGNPermute
extensions.secondorder.diag_ggn.pooling: DiagGGNMaxPool1d DiagGGNMaxPool2d DiagGGNAvgPool1d
    DiagGGNMaxPool3d DiagGGNAvgPool2d DiagGGNAvgPool3d
extensions.secondorder.diag_ggn.rnn: DiagGGNRNN BatchDiagGGNRNN DiagGGNLSTM BatchDiagGGNLSTM
extensions.secondorder.diag_ggn.slicing: DiagGGNSlicing
extensions.secondorder.diag_hessian: DiagHessian BatchDiagHessian
extensions.secondorder.diag_hessian.activations: DiagHReLU DiagHSigmoid DiagHTanh DiagHLeakyReLU
    DiagHLogSigmoid DiagHELU DiagHSELU
extensions.secondorder.diag_hessian.adaptive_avg_pool_nd: DiagHAdaptiveAvgPoolNd
extensions.secondorder.diag_hessian.conv1d: DiagHConv1d BatchDiagHConv1d
extensions.secondorder.diag_hessian.conv2d: DiagHConv2d BatchDiagHConv2d
extensions.secondorder.diag_hessian.conv3d: DiagHConv3d BatchDiagHConv3d
extensions.secondorder.diag_hessian.convnd: DiagHConvND BatchDiagHConvND
extensions.secondorder.diag_hessian.convtranspose1d: DiagHConvTranspose1d
    BatchDiagHConvTranspose1d
extensions.secondorder.diag_hessian.convtranspose2d: DiagHConvTranspose2d
    BatchDiagHConvTranspose2d
extensions.secondorder.diag_hessian.convtranspose3d: DiagHConvTranspose3d
    BatchDiagHConvTranspose3d
extensions.secondorder.diag_hessian.convtransposend: DiagHConvTransposeND
    BatchDiagHConvTransposeND
extensions.secondorder.diag_hessian.diag_h_base: DiagHBaseModule
extensions.secondorder.diag_hessian.dropout: DiagHDropout
extensions.secondorder.diag_hessian.flatten: DiagHFlatten
extensions.secondorder.diag_hessian.linear: DiagHLinear BatchDiagHLinear
extensions.secondorder.diag_hessian.losses: DiagHLoss DiagHMSELoss DiagHCrossEntropyLoss
    DiagHBCEWithLogitsLoss
extensions.secondorder.diag_hessian.pad: DiagHPad
extensions.secondorder.diag_hessian.padding: DiagHZeroPad2d
extensions.secondorder.diag_hessian.pooling: DiagHAvgPool1d DiagHAvgPool2d DiagHAvgPool3d
    DiagHMaxPool1d DiagHMaxPool2d DiagHMaxPool3d
extensions.secondorder.diag_hessian.slicing: DiagHSlicing
extensions.secondorder.hbp: HBP KFAC KFRA KFLR
extensions.secondorder.hbp.activations: HBPReLU HBPSigmoid HBPTanh
extensions.secondorder.hbp.conv1d: HBPConv1d
extensions.secondorder.hbp.conv2d: HBPConv2d
extensions.secondorder.hbp.conv3d: HBPConv3d
extensions.secondorder.hbp.conv_transpose1d: HBPConvTranspose1d
extensions.secondorder.hbp.conv_transpose2d: HBPConvTranspose2d
extensions.secondorder.hbp.conv_transpose3d: HBPConvTranspose3d
extensions.secondorder.hbp.custom_module: HBPScaleModule HBPSumModule
extensions.secondorder.hbp.dropout: HBPDropout
extensions.secondorder.hbp.flatten: HBPFlatten
extensions.secondorder.hbp.hbp_options: LossHessianStrategy BackpropStrategy
    ExpectationApproximation
extensions.secondorder.hbp.hbpbase: HBPBaseModule
extensions.secondorder.hbp.linear: HBPLinear
extensions.secondorder.hbp.losses: HBPLoss HBPMSELoss HBPCrossEntropyLoss HBPBCEWithLogitsLoss
extensions.secondorder.hbp.padding: HBPZeroPad2d
extensions.secondorder.hbp.pooling: HBPAvgPool2d HBPMaxpool2d
extensions.secondorder.sqrt_ggn: SqrtGGN SqrtGGNExact SqrtGGNMC
extensions.secondorder.sqrt_ggn.activations: SqrtGGNReLU SqrtGGNSigmoid SqrtGGNTanh SqrtGGNELU
    SqrtGGNSELU SqrtGGNLeakyReLU SqrtGGNLogSigmoid
extensions.secondorder.sqrt_ggn.base: SqrtGGNBaseModule
extensions.secondorder.sqrt_ggn.batchnorm_nd: SqrtGGNBatchNormNd
extensions.secondorder.sqrt_ggn.convnd: SqrtGGNConv1d SqrtGGNConv2d SqrtGGNConv3d
extensions.secondorder.sqrt_ggn.convtransposend: SqrtGGNConvTranspose1d SqrtGGNConvTranspose2d
    SqrtGGNConvTranspose3d
extensions.secondorder.sqrt_ggn.custom_module: SqrtGGNScaleModule SqrtGGNSumModule
extensions.secondorder.sqrt_ggn.dropout: SqrtGGNDropout
extensions.secondorder.sqrt_ggn.embedding: SqrtGGNEmbedding
extensions.secondorder.sqrt_ggn.flatten: SqrtGGNFlatten
extensions.secondorder.sqrt_ggn.linear: SqrtGGNLinear
extensions.secondorder.sqrt_ggn.losses: SqrtGGNBaseLossModule SqrtGGNMSELoss
    SqrtGGNCrossEntropyLoss SqrtGGNBCEWithLogithsLoss
extensions.secondorder.sqrt_ggn.pad: SqrtGGNPad
extensions.secondorder.sqrt_ggn.padding: SqrtGGNZeroPad2d
extensions.secondorder.sqrt_ggn.pooling: SqrtGGNMaxPool1d SqrtGGNMaxPool2d SqrtGGNMaxPool3d
    SqrtGGNAvgPool1d SqrtGGNAvgPool2d SqrtGGNAvgPool3d
extensions.secondorder.sqrt_ggn.slicing: SqrtGGNSlicing
core.derivatives.adaptive_avg_pool_nd: AdaptiveAvgPoolNDDerivatives AdaptiveAvgPool1dDerivatives
    AdaptiveAvgPool2dDerivatives AdaptiveAvgPool3dDerivatives
core.derivatives.avgpool1d: AvgPool1DDerivatives
core.derivatives.avgpool2d: AvgPool2DDerivatives
core.derivatives.avgpool3d: AvgPool3DDerivatives
core.derivatives.avgpoolnd: AvgPoolNDDerivatives
core.derivatives.basederivatives: BaseDerivatives BaseParameterDerivatives BaseLossDerivatives
core.derivatives.batchnorm_nd: BatchNormNdDerivatives
core.derivatives.bcewithlogitsloss: BCELossWithLogitsDerivatives
core.derivatives.conv1d: Conv1DDerivatives
core.derivatives.conv2d: Conv2DDerivatives
core.derivatives.conv3d: Conv3DDerivatives
core.derivatives.conv_transpose1d: ConvTranspose1DDerivatives
core.derivatives.conv_transpose2d: ConvTranspose2DDerivatives
core.derivatives.conv_transpose3d: ConvTranspose3DDerivatives
core.derivatives.conv_transposend: ConvTransposeNDDerivatives
core.derivatives.convnd: weight_jac_t_save_memory ConvNDDerivatives
core.derivatives.crossentropyloss: CrossEntropyLossDerivatives
core.derivatives.dropout: DropoutDerivatives
core.derivatives.elementwise: ElementwiseDerivatives
core.derivatives.elu: ELUDerivatives
core.derivatives.embedding: EmbeddingDerivatives
core.derivatives.flatten: FlattenDerivatives
core.derivatives.leakyrelu: LeakyReLUDerivatives
core.derivatives.linear: LinearDerivatives
core.derivatives.logsigmoid: LogSigmoidDerivatives
core.derivatives.lstm: LSTMDerivatives
core.derivatives.maxpool1d: MaxPool1DDerivatives
core.derivatives.maxpool2d: MaxPool2DDerivatives
core.derivatives.maxpool3d: MaxPool3DDerivatives
core.derivatives.maxpoolnd: MaxPoolNDDerivatives
core.derivatives.mseloss: MSELossDerivatives
core.derivatives.nll_base: NLLLossDerivatives
core.derivatives.pad: PadDerivatives
core.derivatives.permute: PermuteDerivatives
core.derivatives.relu: ReLUDerivatives
core.derivatives.rnn: RNNDerivatives
core.derivatives.scale_module: ScaleModuleDerivatives
core.derivatives.selu: SELUDerivatives
core.derivatives.sigmoid: SigmoidDerivatives
core.derivatives.slicing: SlicingDerivatives
core.derivatives.sum_module: SumModuleDerivatives
core.derivatives.tanh: TanhDerivatives
core.derivatives.zeropad2d: ZeroPad2dDerivatives
utils.conv: get_conv_module get_conv_function unfold_input get_weight_gradient_factors
    extract_weight_diagonal extract_bias_diagonal unfold_by_conv
utils.conv_transpose: get_conv_transpose_module get_conv_transpose_function
    get_weight_gradient_factors extract_weight_diagonal extract_bias_diagonal
    unfold_by_conv_transpose
utils.convert_parameters: vector_to_parameter_list
utils.errors: batch_norm_raise_error_if_train
utils.examples: load_mnist_dataset get_mnist_dataloader load_one_batch_mnist
    autograd_diag_ggn_exact _autograd_ggn_exact_columns
utils.hooks: no_op
utils.kroneckers: kfacs_to_mat two_kfacs_to_mat kfac_mat_prod apply_kfac_mat_prod
    inv_kfac_mat_prod apply_inv_kfac_mat_prod inv_kfacs all_tensors_of_order is_tensor_of_order
    is_matrix is_vector get_letters
utils.linear: extract_weight_diagonal extract_bias_diagonal
utils.module_classification: is_loss is_nll is_no_op
utils.subsampling: subsample
utils.unsqueeze: kfacmp_unsqueeze_if_missing_dim
custom_module.branching: _Branch SumModule Parallel
custom_module.graph_utils: BackpackTracer convert_module_to_backpack
custom_module.pad: Pad
custom_module.permute: Permute
custom_module.reduce_tuple: ReduceTuple
custom_module.scale_module: ScaleModule
custom_module.slicing: Slicing
hessianfree.ggnvp: ggn_vector_product ggn_vector_product_from_plist
hessianfree.hvp: hessian_vector_product
hessianfree.lop: L_op transposed_jacobian_vector_product
hessianfree.rop: R_op jacobian_vector_product
"""


def names() -> dict[str, list[str]]:
    """Names by full module name."""
    joined = _TABLE.replace("\n    ", " ")
    rows = [line.split(": ") for line in joined.strip().splitlines()]
    return {f"backpack.{module}": found.split() for module, found in rows}
