"""llama.cpp's projector files (``mmproj-*.gguf``): the encoder of pictures or sound of a model in another GGUF file."""
