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


def _maker(name: str, **options: typing.Any) -> Callable[..., nn.Module]:
    """Return a function that makes a model of a class of transformers, by options of its config.

    The function takes other options in their place.
    """

    def make(**others: typing.Any) -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        return kind(kind.config_class(**{**options, **others}))

    return make


LLAMA = _maker("LlamaForCausalLM", **DECODER, **GROUPED_QUERIES)
TIED_LLAMA = _maker("LlamaForCausalLM", **DECODER, **GROUPED_QUERIES, tie_word_embeddings=True)
GPT2 = _maker(
    "GPT2LMHeadModel",
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
BERT = _maker("BertForMaskedLM", **DECODER, **NO_DROPOUT_BERT)
T5 = _maker(
    "T5ForConditionalGeneration",
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
VIT = _maker(
    "ViTForImageClassification",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    image_size=16,
    patch_size=4,
    num_labels=CLASSES,
    **NO_DROPOUT_BERT,
)
MIXTRAL = _maker(
    "MixtralForCausalLM", **DECODER, **GROUPED_QUERIES, num_local_experts=4, num_experts_per_tok=2
)
WHISPER = _maker(
    "WhisperForConditionalGeneration",
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
    "llama": Case(LLAMA, _layers("model.layers"), language_batch, own_loss),
    "tied_llama": Case(TIED_LLAMA, _layers("model.layers"), language_batch, own_loss),
    "gpt2": Case(GPT2, _layers("transformer.h"), language_batch, own_loss),
    "bert": Case(BERT, _layers("bert.encoder.layer"), masked_batch, own_loss),
    "t5": Case(T5, _layers("encoder.block", "decoder.block"), translation_batch, own_loss),
    "vit": Case(VIT, _layers("vit.layers"), picture_batch, own_loss),
    "mixtral": Case(MIXTRAL, _layers("model.layers"), language_batch, own_loss),
    "whisper": Case(
        WHISPER,
        _layers("model.encoder.layers", "model.decoder.layers"),
        speech_batch,
        own_loss,
    ),
}
