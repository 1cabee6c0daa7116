"""From files of any known format to packed batches of tokens."""
