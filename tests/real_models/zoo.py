"""Models of the transformers package, small and with random weights, as cases to train.

Nothing is downloaded. Transformers is imported where a model is made, that is by the ranks: the
process that collects the tests needs neither the package nor the seconds that its import takes.
"""

from __future__ import annotations

import typing

import torch
from torch import Tensor, nn

from models import Batch, Case

if typing.TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 240  # Of a call: the first one imports transformers.

VOCABULARY = 96
SEQUENCE = 10
CLASSES = 5
MELS = 8
FRAMES = 40  # of sound; the encoder's second convolution halves them

DECODER: dict[str, typing.Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED_QUERIES = {"num_key_value_heads": 2}
NO_DROPOUT_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_llama(**options: typing.Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**DECODER, **GROUPED_QUERIES, **options}))


def make_tied_llama() -> nn.Module:
    return make_llama(tie_word_embeddings=True)


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**DECODER, **NO_DROPOUT_BERT))


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=CLASSES,
            **NO_DROPOUT_BERT,
        )
    )


def make_mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**DECODER, **GROUPED_QUERIES, num_local_experts=4, num_experts_per_tok=2)
    )


def make_whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=MELS,
            max_source_positions=FRAMES // 2,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            begin_suppress_tokens=[4, 5],
        )
    )


# --- data -----------------------------------------------------------------------------------------


def draw_tokens(generator: torch.Generator, size: int, length: int = SEQUENCE) -> Tensor:
    """Draw tokens, none of them special to a model."""
    return torch.randint(6, VOCABULARY, (size, length), generator=generator)


def language_batch(generator: torch.Generator, size: int = 2) -> Batch:
    """Draw sequences that are their own labels: models of language shift them by themselves."""
    tokens = draw_tokens(generator, size)
    return tokens, tokens


def masked_batch(generator: torch.Generator, size: int = 2) -> Batch:
    """Draw sequences and labels for every position."""
    return draw_tokens(generator, size), draw_tokens(generator, size)


def translation_batch(generator: torch.Generator, size: int = 2) -> Batch:
    """Draw sequences, and labels of another length."""
    return draw_tokens(generator, size), draw_tokens(generator, size, SEQUENCE - 3)


def picture_batch(generator: torch.Generator, size: int = 2) -> Batch:
    """Draw pictures and classes."""
    pictures = torch.randn(size, 3, 16, 16, generator=generator)
    return pictures, torch.randint(CLASSES, (size,), generator=generator)


def speech_batch(generator: torch.Generator, size: int = 2) -> Batch:
    """Draw spectra and what was said."""
    spectra = torch.randn(size, MELS, FRAMES, generator=generator)
    return spectra, draw_tokens(generator, size, SEQUENCE - 3)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that the model computes itself, from its main input and labels."""
    inputs, labels = batch
    return model(inputs, labels=labels).loss


# --- cases ----------------------------------------------------------------------------------------


def _layers(*paths: str) -> Callable[[nn.Module], list[nn.Module]]:
    """Return a function that finds the layers in the lists at these paths."""

    def find(model: nn.Module) -> list[nn.Module]:
        return [layer for path in paths for layer in model.get_submodule(path)]

    return find


ZOO = {
    "llama": Case(make_llama, _layers("model.layers"), language_batch, own_loss),
    "tied_llama": Case(make_tied_llama, _layers("model.layers"), language_batch, own_loss),
    "gpt2": Case(make_gpt2, _layers("transformer.h"), language_batch, own_loss),
    "bert": Case(make_bert, _layers("bert.encoder.layer"), masked_batch, own_loss),
    "t5": Case(make_t5, _layers("encoder.block", "decoder.block"), translation_batch, own_loss),
    "vit": Case(make_vit, _layers("vit.layers"), picture_batch, own_loss),
    "mixtral": Case(make_mixtral, _layers("model.layers"), language_batch, own_loss),
    "whisper": Case(
        make_whisper,
        _layers("model.encoder.layers", "model.decoder.layers"),
        speech_batch,
        own_loss,
    ),
}
