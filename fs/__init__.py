"""The filesystem: everything between the kernel's requests and the bytes, names and promises of one workspace.

May use the value types and pure cores of ``deltapool.cas``, and nothing else of it. Never imports boto3: the remote is
the other process's business. Only the FUSE edge (``fuse``, ``init``, ``loop``, ``session``) imports pyfuse3, and only
``fuse`` decides an errno; the modules below it are written on plain types and can be tested without a kernel.
"""
