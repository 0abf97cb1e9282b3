"""Unigram tokenizers in C++: the ids of the `tokenizers` library in a fraction of its time.

`facts` reads what a tokenizer consists of, `encoder` does the work, `checked` sees that both agree.
What this package does not know to do exactly as the library does, it leaves to the library: whole
tokenizers, where one of their parts is unknown, and single texts: those with an added token in
them, and those whose characters the versions of Unicode may treat differently.
"""
