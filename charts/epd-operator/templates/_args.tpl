{{- /* The operator's command line. */}}
{{- define "epd-operator.args" -}}
- run
- --leader-election
- --engine-image={{ include "epd-operator.image" (list . .Values.image.engine) }}
- --proxy-image={{ include "epd-operator.image" (list . .Values.image.proxy) }}
{{- with .Values.image.vllm }}
- --vllm-image={{ . }}
{{- end }}
- --image-pull-policy={{ .Values.image.pullPolicy }}
{{- range .Values.image.pullSecrets }}
- --image-pull-secret={{ . }}
{{- end }}
{{- with .Values.autoscaling.prometheusAddress }}
- --prometheus-address={{ . }}
{{- end }}
- --metrics-port={{ .Values.metrics.port }}
- --health-port={{ .Values.health.port }}
- --log-level={{ .Values.logLevel }}
{{- with include "epd-operator.namespaces" . }}
{{- range splitList "\n" . }}
- --namespace={{ . }}
{{- end }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
