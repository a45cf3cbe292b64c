"""Text to tokens and back: tokenizer, chat template, output parser, detokenizer, stop strings. Never imports torch.

It names none of its modules here: the engine's process needs a few of them, and starts faster without the others.
"""
