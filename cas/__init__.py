"""The pool: content named by its digest — how bytes become chunks, where chunks are kept, and what is known of them.

Never imports ``deltapool.fs``, nor pyfuse3: it knows digests, chunks and recipes, but no inode, no name and no mount.
What needs a remote runs in a process of its own, so that nothing here can keep a request of the kernel waiting.
"""
