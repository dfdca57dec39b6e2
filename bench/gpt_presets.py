"""The GPT presets of `tessera train` (models/gpt_presets.cpp), for the peers and the benchmarks."""

PRESETS = {  # width, layers, heads, vocabulary, sequence
    "tiny": (128, 2, 2, 256, 64),
    "small": (256, 4, 4, 4096, 128),
    "gpt2-124m": (768, 12, 12, 50304, 1024),
    "gpt-1b4": (2048, 24, 16, 50304, 1024),
    "gpt-7b": (4096, 32, 32, 50304, 1024),
    "gpt-13b": (5120, 40, 40, 50304, 1024),
}


def num_params(preset):
    """Of a preset: two embeddings, blocks with biases, a norm, and a head without bias."""
    width, layers, _, vocabulary, sequence = PRESETS[preset]
    block = 12 * width * width + 13 * width
    return 2 * vocabulary * width + sequence * width + layers * block + 2 * width


def sequence_tokens(preset):
    return PRESETS[preset][4]
