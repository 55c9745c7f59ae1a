"""Read from a model's configuration what each of its layers keeps, and how it rotates keys.

One reader serves config.json, transformers' configurations and the headers of GGUF files (which `gguf`
translates). It knows the words of many models; a word of a known kind that it did not use is an error.

description    ModelShape and LayerShape, what is read
configuration  read_layers and read_ropes, the reader
words          entries of a configuration, checked and counted as used; the list of known words
kinds          which layer attends, slides, or has a state
sizes          heads, windows and states of a layer
rotations      the rotary embedding of each layer
known          public models by name
gguf           headers of GGUF files in the words of config.json
"""
