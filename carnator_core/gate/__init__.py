"""The gate: discrepancies between a target and a donor, one risk score, a graded decision."""
