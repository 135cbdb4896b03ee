r"""`python -i`: what follows on stdin sees the script's variables.

run: alone
watched: no
python: -i
under: printf 'print(x + 1)\nprint(__name__)\n1 / 0\nx = 7\nprint(x)\n' | "$@"
"""

x = 5
print("done")
