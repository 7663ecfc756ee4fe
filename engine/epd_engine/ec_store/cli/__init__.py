"""`epd-engine store`: what lies in a store of files, and the janitor. No torch.

parser.py    the subcommands and their help
survey.py    a store found and walked
inspect.py   ls, stat, verify, cat-header
clean.py     gc, janitor
output.py    tables, sizes, ages
"""
