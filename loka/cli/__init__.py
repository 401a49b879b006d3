"""The command line: one file a verb; each parses, calls and prints, and holds no logic of its own.

Nothing heavy is imported when a module of this room is: a verb imports what it needs when it runs, so that
`loka --help` answers at once.
"""
