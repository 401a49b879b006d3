"""Plans that `loka tune` confirms by measured steps.

`choices` says what a candidate is, `candidates` which there are, `record` keeps what was measured.
"""
