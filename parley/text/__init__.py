"""Text to tokens and back: tokenizer, chat template, output parser, detokenizer, stop strings. Never imports torch.

This file imports none of the package's modules: the engine process needs few of them and starts faster without the
others.
"""
