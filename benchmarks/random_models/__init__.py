"""Random recommenders, each bound by LoKA and compared with itself unbound: is any wrong in silence?"""
