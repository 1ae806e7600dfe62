# Follows the records into MLflow; needs MLFLOW_TRACKING_URI.
#   docker run rollflow-export --run s3://bucket/runs/RUN
FROM rollflow-base
ENTRYPOINT ["rollflow", "role", "export"]
CMD ["--help"]
