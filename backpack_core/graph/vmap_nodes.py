"""Types of autograd nodes whose formulas vmap is known to treat as a loop does.

Written by ``python -m tests.faults.vmap_nodes --write`` from torch's own operator database.
"""

from __future__ import annotations

# The version of torch that this was found with, and holds for.
TORCH = "2.13"
EXACT = frozenset(
    """
    AbsBackward0 AcosBackward0 AcoshBackward0 AdaptiveAvgPool2DBackward0 AdaptiveAvgPool3DBackward0
    AdaptiveMaxPool2DBackward0 AdaptiveMaxPool3DBackward0 AddBackward0 AddBackward1 AddbmmBackward0
    AddcdivBackward0 AddcmulBackward0 AddmmBackward0 AddmvBackward0 AddrBackward0
    AliasBackward0_copy AmaxBackward0 AminBackward0 AminmaxBackward0 AngleBackward0
    AsStridedBackward0 AsStridedBackward0_copy AsinBackward0 AsinhBackward0 Atan2Backward0
    AtanBackward0 AtanhBackward0 AvgPool2DBackward0 AvgPool3DBackward0 BaddbmmBackward0
    BatchNormWithUpdateBackward0 BernoulliBackward0 BinaryCrossEntropyBackward0
    BinaryCrossEntropyWithLogitsBackward0 BlockDiagBackward0 BmmBackward0 CatBackward0 CeilBackward0
    CeluBackward0 ChannelShuffleBackward0 CholeskyBackward0 CholeskyInverseBackward0
    CholeskySolveBackward0 ClampBackward0 ClampBackward1 ClampMaxBackward1 ClampMinBackward0
    ClampMinBackward1 CloneBackward0 ComplexBackward0 ConjBackward0 ConjPhysicalBackward0
    ConstantPadNdBackward0 ConvolutionBackward0 CopyBackwards CopysignBackward0 CopysignBackward1
    CosBackward0 CoshBackward0 CtcLossBackward0 CummaxBackward0 CumminBackward0 CumprodBackward0
    CumsumBackward0 Deg2RadBackward0 DiagEmbedBackward0 DiagonalBackward0 DiagonalBackward0_copy
    DiagonalScatterBackward0 DigammaBackward0 DistBackward0 DivBackward0 DivBackward1 DivBackward2
    DotBackward0 EluBackward0 EmbeddingBackward0 EmbeddingBagBackward0 ErfBackward0 ErfcBackward0
    ErfinvBackward0 EuclideanDistBackward0 Exp2Backward0 ExpBackward0 ExpandBackward0
    ExpandBackward0_copy Expm1Backward0 FftC2CBackward0 FftC2RBackward0 FftR2CBackward0
    FillBackward0 FlipBackward0 FloorBackward0 FmaxBackward0 FminBackward0 FmodBackward1
    FracBackward0 FractionalMaxPool2DBackward0 FractionalMaxPool3DBackward0 FrexpBackward0
    GatherBackward0 GeluBackward0 GluBackward0 GridSampler2DBackward0 GridSampler3DBackward0
    HardshrinkBackward0 HardsigmoidBackward0 HardswishBackward0 HardtanhBackward0 HuberLossBackward0
    HypotBackward0 I0Backward0 Im2ColBackward0 IndexAddBackward0 IndexBackward0 IndexCopyBackward0
    IndexFillBackward0 IndexFillBackward1 IndexPutBackward0 IndexReduceBackward0
    IndexSelectBackward0 KthvalueBackward0 LdexpBackward0 LeakyReluBackward0 LerpBackward0
    LerpBackward1 LgammaBackward0 LinalgCholeskyExBackward0 LinalgCrossBackward0 LinalgDetBackward0
    LinalgEigBackward0 LinalgEighBackward0 LinalgHouseholderProductBackward0 LinalgInvExBackward0
    LinalgLstsqBackward0 LinalgLuBackward0 LinalgLuFactorExBackward0 LinalgLuSolveBackward0
    LinalgMatrixExpBackward0 LinalgPinvBackward0 LinalgQrBackward0 LinalgSlogdetBackward0
    LinalgSolveExBackward0 LinalgSolveTriangularBackward0 LinalgSvdBackward0
    LinalgVectorNormBackward0 Log10Backward0 Log1PBackward0 Log2Backward0 LogBackward0
    LogSigmoidBackward0 LogSoftmaxBackward0 Logaddexp2Backward0 LogaddexpBackward0
    LogcumsumexpBackward0 LogitBackward0 LogsumexpBackward0 LuUnpackBackward0 MaskedFillBackward0
    MaskedFillBackward1 MaskedScatterBackward0 MaskedSelectBackward0 MaxBackward0 MaxBackward1
    MaxPool2DWithIndicesBackward0 MaxPool2DWithIndicesBackwardBackward0
    MaxPool3DWithIndicesBackward0 MaxUnpool2DBackward0 MaxUnpool3DBackward0 MaximumBackward0
    MeanBackward0 MeanBackward1 MedianBackward0 MedianBackward1 MinBackward0 MinBackward1
    MinimumBackward0 MishBackward0 MmBackward0 ModeBackward0 MseLossBackward0 MulBackward0
    MulBackward1 MultiMarginLossBackward0 MultilabelMarginLossBackward0 MvBackward0
    MvlgammaBackward0 NanToNumBackward0 NanmedianBackward0 NanmedianBackward1 NansumBackward0
    NarrowCopyBackward0 NativeBatchNormBackward0 NativeBatchNormLegitBackward0
    NativeBatchNormLegitBackward1 NativeDropoutBackwardBackward0 NativeGroupNormBackward0
    NativeLayerNormBackward0 NegBackward0 NextafterBackward0 NllLoss2DBackward0 NllLossBackward0
    NormBackward1 NormalBackward1 NormalBackward3 OrmqrBackward0 PdistBackward0 PermuteBackward0
    PermuteBackward0_copy PixelShuffleBackward0 PixelUnshuffleBackward0 PolarBackward0
    PolygammaBackward0 PowBackward0 PowBackward1 PreluKernelBackward0 ProdBackward0 ProdBackward1
    PutBackward0 Rad2DegBackward0 ReciprocalBackward0 ReflectionPad1DBackward0
    ReflectionPad2DBackward0 ReflectionPad3DBackward0 ReluBackward0 RemainderBackward1
    RenormBackward0 RepeatBackward0 ReplicationPad1DBackward0 ReplicationPad2DBackward0
    ReplicationPad3DBackward0 ReshapeAliasBackward0 Rot90Backward0 RoundBackward0 RoundBackward1
    RreluWithNoiseBackward0 RsqrtBackward0 RsubBackward0 SafeSoftmaxBackward0
    ScaledDotProductFlashAttentionForCpuBackward0 ScatterAddBackward0 ScatterBackward0
    ScatterBackward1 ScatterReduceBackward0 SegmentReduceBackward0 SelectBackward0
    SelectScatterBackward0 SgnBackward0 SigmoidBackward0 SignBackward0 SiluBackward0 SinBackward0
    SincBackward0 SinhBackward0 SliceBackward0 SmoothL1LossBackward0 SoftMarginLossBackward0
    SoftmaxBackward0 SoftmaxBackwardDataBackward0 SoftplusBackward0 SoftshrinkBackward0
    SortBackward0 SortBackward1 SpecialEntrBackward0 SpecialErfcxBackward0 SpecialI0EBackward0
    SpecialI1Backward0 SpecialI1EBackward0 SpecialLogNdtrBackward0 SpecialNdtriBackward0
    SpecialXlog1PyBackward0 SplitBackward0 SplitWithSizesBackward0 SplitWithSizesBackward0_copy
    SqrtBackward0 SqueezeBackward0 SqueezeBackward0_copy SqueezeBackward1 SqueezeBackward1_copy
    SqueezeBackward2 SqueezeBackward4 StackBackward0 StdBackward0 StdMeanBackward0 SubBackward0
    SubBackward1 SumBackward0 SumBackward1 TBackward0 TBackward0_copy TakeBackward0 TanBackward0
    TanhBackward0 ThresholdBackward0 ToCopyBackward0 ToSparseBackward0 ToSparseBackward1
    TopkBackward0 TraceBackward0 TransposeBackward0 TransposeBackward0_copy TransposeBackward1
    TriangularSolveBackward0 TrilBackward0 TrilinearBackward0 TriuBackward0 TruncBackward0
    UnbindBackward0 UnbindBackward0_copy UnfoldBackward0 UnfoldBackward0_copy
    UnfoldBackwardBackward0 UnsafeMaskedIndexBackward0 UnsafeMaskedIndexPutAccumulateBackward0
    UnsafeSplitBackward0 UnsafeViewBackward0 UnsqueezeBackward0 UnsqueezeBackward0_copy
    UnsqueezeBackward1 UpsampleBicubic2DBackward0 UpsampleBilinear2DAaBackward0
    UpsampleBilinear2DBackward0 UpsampleLinear1DBackward0 UpsampleNearest1DBackward0
    UpsampleNearest2DBackward0 UpsampleNearest3DBackward0 UpsampleNearestExact1DBackward0
    UpsampleNearestExact2DBackward0 UpsampleNearestExact3DBackward0 UpsampleTrilinear3DBackward0
    VarBackward0 VarMeanBackward0 VdotBackward0 ViewAsComplexBackward0 ViewAsRealBackward0
    ViewBackward0 ViewBackward0_copy WhereBackward0 XlogyBackward0 ZeroBackward0
    """.split()  # noqa: SIM905 - a list of three hundred lines is no easier to read
)
