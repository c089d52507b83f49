"""`tocsin silence`: what people know already is not sent again."""
