//! From text to an expression.
//!
//! ```text
//! sum     = product (("+" | "-") product)*
//! product = signed (("*" | "/") signed)*
//! signed  = ("-" | "+")* power
//! power   = atom (("^" | "**") signed)?
//! atom    = number | function "(" sum ("," sum)* ")" | "(" sum ")"
//! ```
//! A comma before exactly three digits groups thousands, except directly inside a function's parentheses, where
//! a comma always separates arguments; an underscore groups digits anywhere. Positions count characters from 1.

use tools_sdk::ToolError;

use crate::number::{Failure, Number};

/// Most characters of an expression.
pub(crate) const MAX_CHARACTERS: usize = 4_096;
/// Most parentheses, signs and exponents inside each other.
pub(crate) const MAX_DEPTH: usize = 64;

/// An operation on two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    Power,
}

/// A named operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    Sqrt,
    Abs,
    Round,
    Min,
    Max,
    Sum,
}

/// An expression; each step knows where it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expression {
    Number(Number),
    Negate(Box<Expression>),
    /// A first operand and what is done to it, left to right: flat, so that a long sum is not a deep tree.
    Chain(Box<Expression>, Vec<(Operator, usize, Expression)>),
    Call(Function, usize, Vec<Expression>),
}

/// Reads an expression.
pub(crate) fn parse(text: &str) -> Result<Expression, ToolError> {
    let characters: Vec<char> = text.chars().take(MAX_CHARACTERS + 1).collect();
    if characters.len() > MAX_CHARACTERS {
        return Err(ToolError::limit(
            "expression_too_long",
            format!("an expression has at most {MAX_CHARACTERS} characters"),
        ));
    }
    let mut parser = Parser { characters, at: 0, depth: 0, arguments: false };
    let expression = parser.sum()?;
    match parser.peek() {
        None => Ok(expression),
        Some(')') => Err(parser.error("a `)` that closes nothing")),
        Some(',') => Err(parser.error("a comma that neither groups three digits nor separates arguments")),
        Some(other) => Err(parser.error(&format!("expected an operator, found `{other}`"))),
    }
}

struct Parser {
    characters: Vec<char>,
    at: usize,
    depth: usize,
    /// Whether the innermost open parenthesis belongs to a function.
    arguments: bool,
}

impl Parser {
    fn sum(&mut self) -> Result<Expression, ToolError> {
        self.chain(Self::product, |character| match character {
            '+' => Some(Operator::Add),
            '-' | '\u{2212}' => Some(Operator::Subtract),
            _ => None,
        })
    }

    fn product(&mut self) -> Result<Expression, ToolError> {
        self.chain(Self::signed, |character| match character {
            '*' | '\u{d7}' => Some(Operator::Multiply),
            '/' | '\u{f7}' => Some(Operator::Divide),
            _ => None,
        })
    }

    fn chain(
        &mut self,
        operand: fn(&mut Self) -> Result<Expression, ToolError>,
        operator: fn(char) -> Option<Operator>,
    ) -> Result<Expression, ToolError> {
        let first = operand(self)?;
        let mut rest = Vec::new();
        while let Some(found) = self.peek().and_then(operator) {
            let position = self.position();
            self.at += 1;
            rest.push((found, position, operand(self)?));
        }
        Ok(if rest.is_empty() { first } else { Expression::Chain(Box::new(first), rest) })
    }

    fn signed(&mut self) -> Result<Expression, ToolError> {
        match self.peek() {
            Some('-' | '\u{2212}') => {
                self.at += 1;
                self.deeper(|parser| Ok(Expression::Negate(Box::new(parser.signed()?))))
            }
            Some('+') => {
                self.at += 1;
                self.deeper(Self::signed)
            }
            _ => self.power(),
        }
    }

    fn power(&mut self) -> Result<Expression, ToolError> {
        let base = self.atom()?;
        let width = match self.peek() {
            Some('^') => 1,
            Some('*') if self.characters.get(self.at + 1) == Some(&'*') => 2,
            _ => return Ok(base),
        };
        let position = self.position();
        self.at += width;
        let exponent = self.deeper(Self::signed)?;
        Ok(Expression::Chain(Box::new(base), vec![(Operator::Power, position, exponent)]))
    }

    fn atom(&mut self) -> Result<Expression, ToolError> {
        match self.peek() {
            Some('(') => {
                self.at += 1;
                let inner = self.inside(false, Self::sum)?;
                self.close()?;
                Ok(inner)
            }
            Some(first) if first.is_ascii_digit() || first == '.' => self.number(),
            Some(first) if first.is_alphabetic() => self.call(),
            Some(other) => Err(self.error(&format!("expected a number, found `{other}`"))),
            None => Err(self.error("expected a number, found the end")),
        }
    }

    fn call(&mut self) -> Result<Expression, ToolError> {
        let position = self.position();
        let start = self.at;
        while self.characters.get(self.at).is_some_and(|c| c.is_alphanumeric() || *c == '_') {
            self.at += 1;
        }
        let name: String = self.characters[start..self.at].iter().collect();
        let function = match name.to_ascii_lowercase().as_str() {
            "sqrt" => Function::Sqrt,
            "abs" => Function::Abs,
            "round" => Function::Round,
            "min" => Function::Min,
            "max" => Function::Max,
            "sum" => Function::Sum,
            _ => {
                self.at = start;
                return Err(self.error(&format!(
                    "there is no function `{name}`; there are sqrt, abs, round, min, max and sum"
                )));
            }
        };
        if self.peek() != Some('(') {
            return Err(self.error(&format!("expected `(` after `{name}`")));
        }
        self.at += 1;
        let arguments = self.inside(true, Self::arguments)?;
        self.close()?;
        let most = match function {
            Function::Sqrt | Function::Abs => 1,
            Function::Round => 2,
            Function::Min | Function::Max | Function::Sum => usize::MAX,
        };
        if arguments.len() > most {
            self.at = start;
            return Err(self.error(&format!("`{name}` takes at most {most}, here are {}", arguments.len())));
        }
        Ok(Expression::Call(function, position, arguments))
    }

    fn arguments(&mut self) -> Result<Vec<Expression>, ToolError> {
        let mut arguments = vec![self.sum()?];
        while self.peek() == Some(',') {
            self.at += 1;
            arguments.push(self.sum()?);
        }
        Ok(arguments)
    }

    fn number(&mut self) -> Result<Expression, ToolError> {
        let start = self.at;
        let mut digits = String::new();
        self.digits(&mut digits)?;
        while !self.arguments && self.at > start && self.groups_thousands() {
            digits.extend(&self.characters[self.at + 1..self.at + 4]);
            self.at += 4;
        }
        let whole = digits.len();
        if self.characters.get(self.at) == Some(&'.') {
            self.at += 1;
            self.digits(&mut digits)?;
        }
        if digits.is_empty() {
            return Err(self.error("a point without digits"));
        }
        if self.characters.get(self.at) == Some(&'.') {
            return Err(self.error("a second point in one number"));
        }
        let decimals = u32::try_from(digits.len() - whole).unwrap_or(u32::MAX);
        let number =
            Number::from_digits(&digits, decimals).map_err(|failure| too_large(failure, start + 1))?;
        Ok(Expression::Number(number))
    }

    /// Digits with underscores between them.
    fn digits(&mut self, to: &mut String) -> Result<(), ToolError> {
        while let Some(&character) = self.characters.get(self.at) {
            if character.is_ascii_digit() {
                to.push(character);
            } else if character != '_' {
                break;
            } else if !self.characters.get(self.at + 1).is_some_and(char::is_ascii_digit) {
                return Err(self.error("an underscore that is not between digits"));
            }
            self.at += 1;
        }
        Ok(())
    }

    /// Whether here are a comma and exactly three digits.
    fn groups_thousands(&self) -> bool {
        let digit = |offset: usize| self.characters.get(self.at + offset).is_some_and(char::is_ascii_digit);
        self.characters.get(self.at) == Some(&',') && digit(1) && digit(2) && digit(3) && !digit(4)
    }

    fn close(&mut self) -> Result<(), ToolError> {
        match self.peek() {
            Some(')') => {
                self.at += 1;
                Ok(())
            }
            Some(other) => Err(self.error(&format!("expected `)`, found `{other}`"))),
            None => Err(self.error("expected `)`, found the end")),
        }
    }

    fn inside<T>(
        &mut self,
        arguments: bool,
        f: impl FnOnce(&mut Self) -> Result<T, ToolError>,
    ) -> Result<T, ToolError> {
        let outer = std::mem::replace(&mut self.arguments, arguments);
        let result = self.deeper(f);
        self.arguments = outer;
        result
    }

    fn deeper<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, ToolError>) -> Result<T, ToolError> {
        if self.depth == MAX_DEPTH {
            return Err(ToolError::limit(
                "expression_too_deep",
                format!("more than {MAX_DEPTH} levels inside each other at position {}", self.position()),
            ));
        }
        self.depth += 1;
        let result = f(self);
        self.depth -= 1;
        result
    }

    /// The next character that is not a space.
    fn peek(&mut self) -> Option<char> {
        while self.characters.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
        self.characters.get(self.at).copied()
    }

    fn position(&self) -> usize {
        self.at + 1
    }

    fn error(&self, what: &str) -> ToolError {
        ToolError::invalid_input("syntax", format!("at position {}: {what}", self.position()))
    }
}

fn too_large(_failure: Failure, position: usize) -> ToolError {
    ToolError::limit("overflow", format!("at position {position}: the number has too many digits"))
}
