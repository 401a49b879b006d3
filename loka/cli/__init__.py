"""The command line, one file for each verb: they parse options, call and print, without logic of their own.

Modules here import nothing heavy at the top: a verb imports what it needs when it runs, so that `loka --help` is fast.
"""
