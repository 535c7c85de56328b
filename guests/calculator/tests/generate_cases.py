"""Writes cases.json: expressions and their values, computed by Python's fractions and decimal.

    python3 generate_cases.py > cases.json

One case a line: [expression, decimals or null, value, exact]. The seed is fixed, so the file is reproducible.
"""

import json
import random
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction

CONTEXT = Context(prec=2000, rounding=ROUND_HALF_UP, Emax=10**6, Emin=-(10**6))


def written(value, decimals):
    """Decimal form and whether it is the value itself; None for decimals is up to ten places."""
    places = 10 if decimals is None else decimals
    scaled = value * 10**places
    # Half away from zero, by integers only.
    quotient, remainder = divmod(abs(scaled.numerator), scaled.denominator)
    if 2 * remainder >= scaled.denominator:
        quotient += 1
    digits = str(quotient).rjust(places + 1, "0")
    whole, fraction = (digits[:-places], digits[-places:]) if places else (digits, "")
    if decimals is None:
        fraction = fraction.rstrip("0")
    sign = "-" if value < 0 and quotient else ""
    return sign + whole + ("." + fraction if fraction else ""), remainder == 0


def literal(rng):
    whole = rng.randrange(10 ** rng.randint(1, 9))
    text = f"{whole:,}" if rng.random() < 0.3 else str(whole)
    value = Fraction(whole)
    if rng.random() < 0.5:
        places = rng.randint(1, 6)
        part = rng.randrange(10**places)
        text += "." + str(part).rjust(places, "0")
        value += Fraction(part, 10**places)
    return text, value


def tree(rng, depth, inside_call):
    """Text and value; the text is an atom or in parentheses unless depth is the outermost."""
    if depth == 0 or rng.random() < 0.15:
        text, value = literal(rng)
        return (text.replace(",", "") if inside_call else text), value
    kind = rng.random()
    if kind < 0.6:
        left, a = tree(rng, depth - 1, False)
        right, b = tree(rng, depth - 1, False)
        operator = rng.choice("+-*/")
        if operator == "/" and b == 0:
            operator = "+"
        space = rng.choice(["", " "])
        value = {"+": a + b, "-": a - b, "*": a * b}[operator] if operator != "/" else a / b
        return f"({left}{space}{operator}{space}{right})", value
    if kind < 0.7:
        inner, a = tree(rng, depth - 1, False)
        return f"(-{inner})", -a
    if kind < 0.8:
        base, a = tree(rng, min(depth - 1, 1), False)
        exponent = rng.randint(-4, 6)
        if a == 0 and exponent < 0:
            exponent = 2
        sign = rng.choice(["^", "**"])
        return f"({base}{sign}{exponent})", a**exponent
    name = rng.choice(["abs", "min", "max", "sum"])
    count = 1 if name == "abs" else rng.randint(1, 4)
    parts = [tree(rng, depth - 1, True) for _ in range(count)]
    values = [value for _, value in parts]
    value = {"abs": lambda v: abs(v[0]), "min": min, "max": max, "sum": sum}[name](values)
    return f"{name}({', '.join(text for text, _ in parts)})", Fraction(value)


def main():
    rng = random.Random(20)
    for _ in range(600):
        text, value = tree(rng, rng.randint(1, 4), False)
        decimals = rng.choice([None, 0, 1, 2, 2, 5, 20])
        print(json.dumps([text, decimals, *written(value, decimals)]))
    # Precedence without parentheses: Python agrees on + - * / ** and unary minus.
    for _ in range(200):
        count = rng.randint(2, 7)
        numbers = [rng.randint(1, 99) for _ in range(count)]
        operators = [rng.choice(["+", "-", "*", "/"]) for _ in range(count - 1)]
        plain = str(numbers[0])
        exact = f"Fraction({numbers[0]})"
        for operator, number in zip(operators, numbers[1:]):
            minus = "-" if rng.random() < 0.2 else ""
            power = "**2" if rng.random() < 0.2 else ""
            plain += f" {operator} {minus}{number}{power}"
            exact += f" {operator} {minus}Fraction({number}){power}"
        value = eval(exact, {"Fraction": Fraction})
        print(json.dumps([plain, 6, *written(value, 6)]))
    # Roots: Python's decimal at 2,000 digits.
    for _ in range(100):
        text, value = literal(rng)
        root = CONTEXT.sqrt(CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator)))
        square = Fraction(root) ** 2 == value
        decimals = rng.choice([None, 0, 2, 10, 60])
        digits, exact = written(Fraction(root), decimals)
        print(json.dumps([f"sqrt({text.replace(',', '')})", decimals, digits, exact and square]))


main()
