"""Whole tiny pipelines that take prompts: tokenizers made here, for the scripts that users run on real ones."""

from pathlib import Path

import diffusers
import torch
import transformers

from diffusion.models import MODELS
from diffusion.run import random_model
from diffusion.spec import shrunk
from integration_tests.support.tiny_diffusion import make_flux_pipeline


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_clip_tokenizer() -> transformers.CLIPTokenizer:
    """Make a tokenizer of single letters; special tokens 0 and 1, at most 16 tokens."""
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in LETTERS:
        vocab[letter], vocab[f"{letter}</w>"] = len(vocab), len(vocab) + 1
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=16)


def make_t5_tokenizer(length: int = 32) -> transformers.T5Tokenizer:
    """Make a tokenizer of single letters, in a vocabulary of fewer than 96."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=length)


def save_flux(directory: Path) -> Path:
    """A FluxPipeline with tokenizers in bf16, 16 x 16 pixels; returns the directory."""
    pipe = make_flux_pipeline(torch.bfloat16)
    pipe.register_modules(tokenizer=make_clip_tokenizer(), tokenizer_2=make_t5_tokenizer())
    pipe.save_pretrained(directory)
    return directory


def save_cogvideox(directory: Path) -> Path:
    """A CogVideoXPipeline in bf16, for sizes that are multiples of 16, 9 frames; returns the directory."""
    torch.manual_seed(0)
    spec = shrunk(MODELS["cogvideox-5b"], blocks=1)
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=spec.config["in_channels"],
        layers_per_block=1,
        norm_num_groups=2,
    )
    t5 = transformers.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    diffusers.CogVideoXPipeline(
        tokenizer=make_t5_tokenizer(),
        text_encoder=transformers.T5EncoderModel(t5).bfloat16(),
        vae=vae.bfloat16(),
        transformer=random_model(spec),
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    ).save_pretrained(directory)
    return directory
