"""How far does a step go, and what keeps λ inside Ω?"""
