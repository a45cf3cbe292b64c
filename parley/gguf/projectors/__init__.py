"""llama.cpp's projector files (``mmproj-*.gguf``): the image or audio encoder of a model in another GGUF file."""
