//! From an expression to its value; failures say where they happened.

use tools_sdk::ToolError;

use crate::number::{Failure, MAX_BITS, Number};
use crate::syntax::{Expression, Function, Operator};

/// Most places `round` goes to, either way.
const MAX_ROUND: i32 = 100;

/// Computes an expression.
pub(crate) fn evaluate(expression: &Expression) -> Result<Number, ToolError> {
    match expression {
        Expression::Number(number) => Ok(number.clone()),
        Expression::Negate(inner) => Ok(evaluate(inner)?.negate()),
        Expression::Chain(first, rest) => {
            let mut value = evaluate(first)?;
            for (operator, position, operand) in rest {
                let operand = evaluate(operand)?;
                value = apply(*operator, &value, &operand).map_err(|failure| error(failure, *position))?;
            }
            Ok(value)
        }
        Expression::Call(function, position, arguments) => {
            let values = arguments.iter().map(evaluate).collect::<Result<Vec<_>, _>>()?;
            call(*function, *position, &values)
        }
    }
}

fn apply(operator: Operator, left: &Number, right: &Number) -> Result<Number, Failure> {
    match operator {
        Operator::Add => left.add(right),
        Operator::Subtract => left.subtract(right),
        Operator::Multiply => left.multiply(right),
        Operator::Divide => left.divide(right),
        Operator::Power => left.power(right),
    }
}

fn call(function: Function, position: usize, values: &[Number]) -> Result<Number, ToolError> {
    let Some((first, rest)) = values.split_first() else {
        return Err(ToolError::invalid_input(
            "syntax",
            format!("at position {position}: nothing to compute"),
        ));
    };
    let at = |failure| error(failure, position);
    match function {
        Function::Sqrt => first.square_root().map_err(at),
        Function::Abs => Ok(first.abs()),
        Function::Round => {
            let places = match rest.first() {
                None => 0,
                Some(places) => {
                    let small = places.to_small_integer().filter(|places| places.abs() <= MAX_ROUND);
                    small.ok_or_else(|| {
                        let message = format!(
                            "at position {position}: round takes a whole number of places from -{MAX_ROUND} to {MAX_ROUND}"
                        );
                        ToolError::invalid_input("round_places", message)
                    })?
                }
            };
            first.round(places).map_err(at)
        }
        Function::Sum => rest.iter().try_fold(first.clone(), |sum, value| sum.add(value)).map_err(at),
        Function::Min => Ok(choose(first, rest, |value, best| value.is_less_than(best))),
        Function::Max => Ok(choose(first, rest, |value, best| best.is_less_than(value))),
    }
}

fn choose(first: &Number, rest: &[Number], better: fn(&Number, &Number) -> bool) -> Number {
    let mut best = first;
    for value in rest {
        if better(value, best) {
            best = value;
        }
    }
    best.clone()
}

fn error(failure: Failure, position: usize) -> ToolError {
    let (code, what) = match failure {
        Failure::DivisionByZero => ("division_by_zero", "division by zero".to_owned()),
        Failure::TooLarge => ("overflow", format!("the result needs more than {MAX_BITS} bits")),
        Failure::NegativeRoot => ("negative_root", "the root of a negative number is not real".to_owned()),
        Failure::FractionalExponent => {
            ("fractional_exponent", "an exponent is a whole number or a half of one".to_owned())
        }
    };
    let message = format!("at position {position}: {what}");
    if failure == Failure::TooLarge {
        ToolError::limit(code, message)
    } else {
        ToolError::invalid_input(code, message)
    }
}
