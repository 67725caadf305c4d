"""The sizes of a small Llama, and the names and shapes of its parameters in transformers' LlamaForCausalLM."""

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BLOCK_SHAPES = {
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
}
HUGGING_FACE_SHAPES = {
    "model.embed_tokens.weight": (50, 32),
    **{f"model.layers.0.{name}": shape for name, shape in BLOCK_SHAPES.items()},
    **{f"model.layers.1.{name}": shape for name, shape in BLOCK_SHAPES.items()},
    "model.norm.weight": (32,),
    "lm_head.weight": (50, 32),
}
