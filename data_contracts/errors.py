"""Every error this project raises on purpose.

RollflowError
  + ConfigError (also ValueError): what the user asked for cannot be run
  + ContractError (also ValueError): data do not match what was promised
    - SchemaMismatch: a column is missing, extra or of another type
    - RowInvalid: a value of a row breaks the contract
    - DigestMismatch: bytes or weights are not those that were named
  + StoreError (also OSError): object storage refused or lost something
    - ObjectMissing (also FileNotFoundError)
    - ObjectExists (also FileExistsError): a create-only put lost
    - StoreUnfit: the store does not keep a promise that the records rely on
  + ProtocolError (also RuntimeError): records contradict each other; the run must stop
  + RunStopped (also RuntimeError): somebody asked the run to stop; not a failure
  + RoleFailed (also RuntimeError): another role died for good; carries that role's own error
  + EngineError (also RuntimeError): the generation engine failed
  + TrainingDiverged (also ArithmeticError): two non-finite steps in a row
  + RankFailed (also RuntimeError): a process of a training group died; the role can start again
  + ServiceError (also RuntimeError): a server that Rollflow starts or uses does not answer

Every class survives pickling (Prefect and Dask move exceptions between processes): each takes one message.
"""


class RollflowError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(RollflowError, ValueError):
    """What the user asked for cannot be run."""


class ContractError(RollflowError, ValueError):
    """Data do not match what was promised."""


class SchemaMismatch(ContractError):
    """A column is missing, extra or of another type."""


class RowInvalid(ContractError):
    """A value of a row breaks the contract."""


class DigestMismatch(ContractError):
    """Bytes or weights are not those that were named."""


class StoreError(RollflowError, OSError):
    """Object storage refused or lost something."""


class ObjectMissing(StoreError, FileNotFoundError):
    """No object has this key."""


class ObjectExists(StoreError, FileExistsError):
    """A create-only put found the key taken."""


class StoreUnfit(StoreError):
    """The store does not keep a promise that the records rely on."""


class ProtocolError(RollflowError, RuntimeError):
    """Records contradict each other; the run must stop."""


class RunStopped(RollflowError, RuntimeError):
    """Somebody asked the run to stop."""


class RoleFailed(RollflowError, RuntimeError):
    """Another role died for good."""


class EngineError(RollflowError, RuntimeError):
    """The generation engine failed."""


class TrainingDiverged(RollflowError, ArithmeticError):
    """Two steps in a row had a loss or gradient that is not finite."""


class RankFailed(RollflowError, RuntimeError):
    """A process of a training group died or failed, and the group with it."""


class ServiceError(RollflowError, RuntimeError):
    """A server that Rollflow starts or uses does not answer."""
