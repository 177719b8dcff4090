"""The classes of the transformers package that the rules apply to, by qualified name.

A table of ``family:Class,Class``; ``family/file`` if the file has another name. A test compares
it with the installed version of the package, and lists the classes that are left out, with reasons.
"""

from __future__ import annotations

_GAINS = """
    afmoe:AfmoeRMSNorm aimv2:Aimv2RMSNorm apertus:ApertusRMSNorm arcee:ArceeRMSNorm
    aria:AriaTextRMSNorm axk1:AXK1RMSNorm axk2:AXK2RMSNorm
    bailing_hybrid:BailingHybridRMSNorm,BailingHybridRMSNormGated
    bamba:BambaRMSNormGated,BambaRMSNorm beam:BeamRMSNorm bitnet:BitNetRMSNorm blt:BltRMSNorm
    chameleon:ChameleonRMSNorm,ChameleonLayerNorm clvp:ClvpRMSNorm cohere:CohereLayerNorm
    cohere2:Cohere2LayerNorm cohere2_moe:Cohere2MoeRMSNorm,Cohere2MoeLayerNorm
    cohere_compass:CohereCompassLayerNorm convnext:ConvNextLayerNorm
    convnextv2:ConvNextV2LayerNorm cosmos3_edge:Cosmos3EdgeTextRMSNorm cpmant:CpmAntLayerNorm
    csm:CsmRMSNorm cwm:CwmRMSNorm deberta:DebertaLayerNorm
    deepseek_ocr2:DeepseekOcr2SamLayerNorm,DeepseekOcr2VisionRMSNorm,DeepseekOcr2TextRMSNorm
    deepseek_v2:DeepseekV2RMSNorm deepseek_v3:DeepseekV3RMSNorm deepseek_v32:DeepseekV32RMSNorm
    deepseek_v4:DeepseekV4RMSNorm deepseek_vl_hybrid:DeepseekVLHybridLayerNorm
    deimv2:Deimv2RMSNorm dia:DiaRMSNorm diffllama:DiffLlamaRMSNorm
    diffusion_gemma:DiffusionGemmaRMSNorm dinov2:Dinov2LayerScale
    dinov2_with_registers:Dinov2WithRegistersLayerScale dinov3_convnext:DINOv3ConvNextLayerNorm
    dinov3_vit:DINOv3ViTLayerScale doge:DogeRMSNorm dots1:Dots1RMSNorm dots3_note:Dots3NoteRMSNorm
    edgetam:EdgeTamLayerNorm edgetam_video:EdgeTamVideoLayerNorm
    embedding_gemma2:EmbeddingGemma2RMSNorm emu3:Emu3RMSNorm eomt:EomtLayerScale
    eomt_dinov3:EomtDinov3LayerScale ernie4_5:Ernie4_5RMSNorm ernie4_5_moe:Ernie4_5_MoeRMSNorm
    ernie4_5_vl_moe:Ernie4_5_VLMoeRMSNorm esm/esmfold:EsmFoldLayerNorm esmc:EsmcLayerNorm
    esmfold2:EsmFold2LayerNorm eurobert:EuroBertRMSNorm evolla:EvollaRMSNorm
    exaone4:Exaone4RMSNorm exaone4_5:Exaone4_5_RMSNorm exaone_moe:ExaoneMoeRMSNorm
    falcon_h1:FalconH1RMSNormGated,FalconH1RMSNorm falcon_mamba:FalconMambaRMSNorm
    flex_olmo:FlexOlmoRMSNorm flint:FlintRMSNorm gemma:GemmaRMSNorm gemma2:Gemma2RMSNorm
    gemma3:Gemma3RMSNorm gemma3n:Gemma3nRMSNorm gemma4:Gemma4RMSNorm
    gemma4_unified:Gemma4UnifiedRMSNorm glm:GlmRMSNorm glm4:Glm4RMSNorm glm4_moe:Glm4MoeRMSNorm
    glm4_moe_lite:Glm4MoeLiteRMSNorm glm4v:Glm4vRMSNorm
    glm4v_moe:Glm4vMoeTextRMSNorm,Glm4vMoeRMSNorm
    glm5_next:Glm5NextTextRMSNorm,Glm5NextTextRMSNormGated,Glm5NextRMSNorm
    glm_image:GlmImageRMSNorm glm_moe_dsa:GlmMoeDsaRMSNorm glm_ocr:GlmOcrRMSNorm
    got_ocr2:GotOcr2LayerNorm gpt_oss:GptOssRMSNorm
    gradium_phonon_tts:GradiumPhononTTSFlowLayerNorm granite:GraniteRMSNorm
    granite4_vision:Granite4VisionTextRMSNorm granite_docling:GraniteDoclingTextRMSNorm
    granite_swa:GraniteSWARMSNorm granitemoe:GraniteMoeRMSNorm granitemoe_swa:GraniteMoeSWARMSNorm
    granitemoehybrid:GraniteMoeHybridRMSNormGated,GraniteMoeHybridRMSNorm
    granitemoeshared:GraniteMoeSharedRMSNorm helium:HeliumRMSNorm
    higgs_audio_v2:HiggsAudioV2RMSNorm hunyuan_v1_dense:HunYuanDenseV1RMSNorm
    hunyuan_v1_moe:HunYuanMoEV1RMSNorm hunyuan_vl:HunYuanVLRMSNorm hy_v3:HYV3RMSNorm
    hy_v4:HYV4RMSNorm hyperclovax:HyperCLOVAXRMSNorm idefics:IdeficsRMSNorm
    idefics2:Idefics2RMSNorm idefics3:Idefics3RMSNorm imagegpt:ImageGPTLayerNorm
    inkling:InklingRMSNorm inkling2:Inkling2RMSNorm internvl:InternVLVisionRMSNorm
    jamba:JambaRMSNorm jetmoe:JetMoeRMSNorm kimi_linear:KimiLinearRMSNorm,KimiLinearRMSNormGated
    kolibri1:Kolibri1RMSNorm kosmos2_5:Kosmos2_5LayerNorm
    kyutai_speech_to_text:KyutaiSpeechToTextRMSNorm laguna:LagunaRMSNorm lfm2:Lfm2RMSNorm
    lfm2_moe:Lfm2MoeRMSNorm lfm3:Lfm3RMSNorm lfm3_vl:Lfm3VlVisionRMSNorm
    lighton_ocr:LightOnOcrRMSNorm llama:LlamaRMSNorm llama4:Llama4TextRMSNorm
    longcat_flash:LongcatFlashRMSNorm longt5:LongT5LayerNorm lw_detr:LwDetrLayerNorm
    mamba:MambaRMSNorm mamba2:MambaRMSNormGated,Mamba2RMSNorm mellum:MellumRMSNorm
    mimi:MimiLayerScale mimo_v2_flash:MiMoV2FlashRMSNorm minicpm3:MiniCPM3RMSNorm
    minimax:MiniMaxRMSNorm minimax_m2:MiniMaxM2RMSNorm minimax_m3_vl:MiniMaxM3VLRMSNorm
    ministral:MinistralRMSNorm ministral3:Ministral3RMSNorm mistral:MistralRMSNorm
    mistral3:Mistral3RMSNorm mistral4:Mistral4RMSNorm mistral_large4:MistralLarge4RMSNorm
    mixtral:MixtralRMSNorm mllama:MllamaTextRMSNorm mobilebert:NoNorm molmo2:Molmo2RMSNorm
    moshi:MoshiRMSNorm mt5:MT5LayerNorm
    muse_glimmer:MuseGlimmerRMSNorm,MuseGlimmerTextCenteredRMSNorm
    muse_glimmer_assistant:MuseGlimmerAssistantRMSNorm
    muse_spark:MuseSparkRMSNorm,MuseSparkTextCenteredRMSNorm
    nemotron_h:NemotronHRMSNormGated,NemotronHRMSNorm nemotron_h_omni:NemotronH_Omni_RMSNorm
    neomme:NeoMMERMSNorm neucodec:NeuCodecRMSNorm olmo2:Olmo2RMSNorm olmo3:Olmo3RMSNorm
    olmo_hybrid:OlmoHybridRMSNormGated,OlmoHybridRMSNorm olmoe:OlmoeRMSNorm
    openai_privacy_filter:OpenAIPrivacyFilterRMSNorm ovis2:Ovis2RMSNorm
    paddleocr_vl:PaddleOCRRMSNorm pe_audio:PeAudioEncoderRMSNorm
    pe_audio_video:PeAudioVideoEncoderRMSNorm pe_video:PeVideoEncoderRMSNorm phi3:Phi3RMSNorm
    phi4_multimodal:Phi4MultimodalRMSNorm pix2struct:Pix2StructLayerNorm pixtral:PixtralRMSNorm
    pocket_tts:PocketTTSFlowLayerNorm pocket_tts_audio_tokenizer:PocketTTSAudioTokenizerLayerScale
    pop2piano:Pop2PianoLayerNorm pp_formulanet:PPFormulaNetLayerNorm
    qianfan_ocr:QianfanOCRVisionRMSNorm qwen2:Qwen2RMSNorm qwen2_5_omni:Qwen2_5OmniRMSNorm
    qwen2_5_vl:Qwen2_5_VLRMSNorm qwen2_moe:Qwen2MoeRMSNorm qwen2_vl:Qwen2VLRMSNorm
    qwen3:Qwen3RMSNorm qwen3_5:Qwen3_5RMSNormGated,Qwen3_5RMSNorm
    qwen3_5_moe:Qwen3_5MoeRMSNormGated,Qwen3_5MoeRMSNorm qwen3_moe:Qwen3MoeRMSNorm
    qwen3_next:Qwen3NextRMSNormGated,Qwen3NextRMSNorm
    qwen3_omni_moe:Qwen3OmniMoeThinkerTextRMSNorm,Qwen3OmniMoeTextRMSNorm,Qwen3OmniMoeRMSNorm,Qwen3OmniMoeCode2WavRMSNorm,Qwen3OmniMoeCode2WavLayerScale
    qwen3_vl:Qwen3VLTextRMSNorm qwen3_vl_moe:Qwen3VLMoeTextRMSNorm
    qwen4_exp:Qwen4ExpTextRMSNorm,Qwen4ExpTextRMSNormGated radio:RadioLayerScale
    recurrent_gemma:RecurrentGemmaRMSNorm rf_detr:RfDetrDinov2LayerScale,RfDetrLayerNorm
    sam:SamLayerNorm sam2:Sam2LayerNorm sam2_video:Sam2VideoLayerNorm sam3:Sam3ViTLayerScale
    sam3_tracker:Sam3TrackerLayerNorm sam3_tracker_video:Sam3TrackerVideoLayerNorm
    sam_hq:SamHQLayerNorm sapiens2:Sapiens2RMSNorm,Sapiens2LayerScale seed_oss:SeedOssRMSNorm
    seggpt:SegGptLayerNorm slanext:SLANeXtLayerNorm smollm3:SmolLM3RMSNorm
    solar_open:SolarOpenRMSNorm step3p7:Step3p7RMSNorm
    switch_transformers:SwitchTransformersLayerNorm t5:T5LayerNorm t5gemma:T5GemmaRMSNorm
    t5gemma2:T5Gemma2RMSNorm timesfm:TimesFmRMSNorm timesfm2_5:TimesFm2_5RMSNorm
    tipsv2:Tipsv2VisionLayerScale udop:UdopLayerNorm ultrabert:UltrabertRMSNorm
    ultravbert:UltraVBertRMSNorm umt5:UMT5LayerNorm
    unlimited_ocr:UnlimitedOcrSamLayerNorm,UnlimitedOcrTextRMSNorm vaultgemma:VaultGemmaRMSNorm
    vibevoice:VibeVoiceRMSNorm vibevoice_acoustic_tokenizer:VibeVoiceAcousticTokenizerRMSNorm
    vibevoice_asr:VibeVoiceAsrRMSNorm videomt:VideomtLayerScale videoprism:VideoPrismLayerNorm
    voxtral_realtime:VoxtralRealtimeRMSNorm xcodec2:Xcodec2RMSNorm youtu:YoutuRMSNorm
    zamba:ZambaRMSNorm zamba2:Zamba2RMSNormGated,Zamba2RMSNorm zaya:ZayaRMSNorm
"""

_EMBEDDINGS = """
    bart:BartLearnedPositionalEmbedding,BartScaledWordEmbedding
    bigbird_pegasus:BigBirdPegasusLearnedPositionalEmbedding,BigBirdPegasusScaledWordEmbedding
    biogpt:BioGptLearnedPositionalEmbedding,BioGptScaledWordEmbedding
    blenderbot:BlenderbotLearnedPositionalEmbedding,BlenderbotScaledWordEmbedding
    blenderbot_small:BlenderbotSmallLearnedPositionalEmbedding
    diffusion_gemma:DiffusionGemmaTextScaledWordEmbedding
    embedding_gemma2:EmbeddingGemma2TextScaledWordEmbedding gemma:GemmaTextScaledWordEmbedding
    gemma2:Gemma2TextScaledWordEmbedding gemma3:Gemma3TextScaledWordEmbedding
    gemma3n:Gemma3nTextScaledWordEmbedding gemma4:Gemma4TextScaledWordEmbedding
    gemma4_unified:Gemma4UnifiedTextScaledWordEmbedding led:LEDLearnedPositionalEmbedding
    m2m_100:M2M100ScaledWordEmbedding
    mbart:MBartLearnedPositionalEmbedding,MBartScaledWordEmbedding
    minicpm3:MiniCPM3ScaledWordEmbedding mvp:MvpLearnedPositionalEmbedding
    nllb_moe:NllbMoeScaledWordEmbedding opt:OPTLearnedPositionalEmbedding
    pegasus_x:PegasusXScaledWordEmbedding
    plbart:PLBartScaledWordEmbedding,PLBartLearnedPositionalEmbedding
    pp_formulanet:PPFormulaNetLearnedPositionalEmbedding,PPFormulaNetScaledWordEmbedding
    seamless_m4t:SeamlessM4TScaledWordEmbedding seamless_m4t_v2:SeamlessM4Tv2ScaledWordEmbedding
    trocr:TrOCRLearnedPositionalEmbedding,TrOCRScaledWordEmbedding
    vaultgemma:VaultGemmaTextScaledWordEmbedding xglm:XGLMScaledWordEmbedding
"""


def _qualified(table: str) -> tuple[str, ...]:
    """``transformers.models.family.modeling_family.Class`` for each."""
    names = []
    for entry in table.split():
        place, classes = entry.split(":")
        family, _, file = place.partition("/")
        module = f"transformers.models.{family}.modeling_{file or family}"
        names += [f"{module}.{name}" for name in classes.split(",")]
    return tuple(names)


GAINS = _qualified(_GAINS)
EMBEDDINGS = _qualified(_EMBEDDINGS)
