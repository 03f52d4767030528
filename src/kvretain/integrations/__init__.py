"""kvretain inside other people's programs, one module a program; each imports its program only when it is used."""
